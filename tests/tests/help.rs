//! What every tool says about itself.
#![allow(clippy::unwrap_used)]

use waste_common::cli::Exit;
use waste_tests::tool::{emulated, run};

const TOOLS: [&str; 7] = ["download", "convert", "verify", "plan", "run", "bench", "serve"];

#[test]
fn every_help_has_examples_and_exit_codes() {
    if emulated() {
        return;
    }
    for tool in TOOLS.map(|tool| format!("waste-{tool}")) {
        let help = run(&tool, ["--help"]).done().stdout;
        let (_, rest) = help.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{tool}: no examples"));
        let (examples, exits) = rest.split_once("\nExit codes:\n").unwrap();
        assert!(examples.matches(&tool).count() >= 2, "{tool}: {examples}");
        for (exit, meaning) in Exit::TABLE {
            assert!(exits.contains(&format!("  {:<3} {meaning}", exit.code())), "{tool}: {exits}");
        }
        // The options of the examples are options of the tool, or of its subcommands.
        let mut known = help.clone();
        for word in run(&tool, ["man", "?"]).stderr.split(['[', ']']).nth(1).unwrap_or_default().split('|') {
            if word.chars().all(|letter| letter.is_ascii_lowercase()) && !word.is_empty() {
                known += &run(&tool, [word, "--help"]).stdout;
            }
        }
        for line in examples.lines().filter(|line| line.contains(&tool)) {
            let (_, command) = line.split_once(&tool).unwrap();
            let command = command.split(['|', ';', '>']).next().unwrap();
            for option in command.split_whitespace().filter(|word| word.starts_with("--")) {
                let option = option.split('=').next().unwrap();
                let (listed, _) = known.split_once("\nExamples:\n").unwrap();
                let elsewhere = known.matches(option).count() > examples.matches(option).count();
                assert!(listed.contains(option) || elsewhere, "{tool}: {option} in {line}");
            }
        }
    }
}
