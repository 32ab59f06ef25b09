//! The `main` of every tool: parse, run, render.

use super::output::Streams;
use super::{CommonArgs, Exit, Failure, Output};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches, Parser, ValueEnum};
use clap_complete::Shell;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// What a tool says about itself.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    /// Its name, `waste-plan`.
    pub name: &'static str,
    /// Its version; `env!("CARGO_PKG_VERSION")`.
    pub version: &'static str,
    /// The schema of its JSON, `waste-plan/1`.
    pub schema: &'static str,
    /// The examples of `--help`, one a task, each line indented by two spaces.
    pub examples: &'static str,
    /// Further lines of `--version -v`: name and value, such as the kernels in use.
    pub details: fn() -> Vec<(&'static str, String)>,
}

/// The closing part of a `--help`: examples, the table of exit codes, and how sizes are written.
/// [`main`] adds it by itself.
pub fn after_help(examples: &str) -> String {
    let mut text = String::new();
    if !examples.trim().is_empty() {
        text.push_str(&format!("Examples:\n{}\n\n", examples.trim_matches('\n')));
    }
    text.push_str("Exit codes:\n");
    for (exit, meaning) in Exit::TABLE {
        text.push_str(&format!("  {:<3} {meaning}\n", exit.code()));
    }
    text.push_str(
        "\nSizes: 46GiB, 46G and 46GB are the same (powers of 1024); 1.5T; or plain bytes. Printed as GiB.\n\
         MODEL `-` takes the JSON of the previous tool from standard input.",
    );
    text
}

/// The `main` of a tool. `A` flattens [`CommonArgs`]; `run` does the work and answers with its exit.
///
/// Handles `--help`, `--version` (`-v` for more lines), the hidden `completions SHELL` and `man [SUBCOMMAND]`
/// (a model of that name is written `./man`), wrong usage, failures, panics and a reader that goes away.
pub fn main<A: Parser>(tool: Tool, run: impl FnOnce(A, &Output) -> Result<Exit, Failure>) -> ExitCode {
    std::panic::set_hook(Box::new(move |info| {
        let backtrace = std::backtrace::Backtrace::capture();
        let mut stderr = io::stderr();
        let _ = writeln!(stderr, "{}: {info}", tool.name);
        if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
            let _ = writeln!(stderr, "{backtrace}");
        }
    }));
    ExitCode::from(execute(&tool, std::env::args_os().collect(), Streams::standard(), run).code())
}

/// What a tool did in [`run_captured`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    /// The exit.
    pub exit: Exit,
    /// What was written to stdout.
    pub stdout: String,
    /// What was written to stderr.
    pub stderr: String,
}

/// Run a tool in this process with the given arguments (without the program name) and hold what it writes:
/// for tests.
pub fn run_captured<A: Parser>(
    tool: Tool,
    args: impl IntoIterator<Item = impl Into<OsString>>,
    run: impl FnOnce(A, &Output) -> Result<Exit, Failure>,
) -> Captured {
    let argv = std::iter::once(tool.name.into()).chain(args.into_iter().map(Into::into)).collect();
    let (stdout, stderr) = (Shared::default(), Shared::default());
    let streams =
        Streams { stdout: Box::new(stdout.clone()), stderr: Box::new(stderr.clone()), terminal: false };
    let exit = execute(&tool, argv, streams, run);
    Captured { exit, stdout: stdout.text(), stderr: stderr.text() }
}

/// A buffer that several writers share.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Shared {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn execute<A: Parser>(
    tool: &Tool,
    argv: Vec<OsString>,
    streams: Streams,
    run: impl FnOnce(A, &Output) -> Result<Exit, Failure>,
) -> Exit {
    let parsed = parse::<A>(tool, &argv);
    let flags = match &parsed {
        Parsed::Run(_, flags) => *flags,
        _ => CommonArgs::scan(&argv),
    };
    let output = Output::new(tool.name, tool.schema, flags, streams);
    let outcome = catch_unwind(AssertUnwindSafe(|| match parsed {
        Parsed::Run(args, _) => run(args, &output),
        Parsed::Text(text) => output.text().write_all(text.as_bytes()).map(|()| Exit::Done),
        Parsed::Version => version(tool, &output).map(|()| Exit::Done),
        Parsed::Wrong(failure) => Err(failure),
    }));
    let exit = match outcome {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => output.fail(&failure),
        Err(payload) => {
            let reason = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("unknown");
            output.fail(&Failure::internal(format!(
                "internal error: {reason} (this is a bug of {} {}; please report it with the command line)",
                tool.name, tool.version
            )))
        }
    };
    output.finish(exit)
}

enum Parsed<A> {
    Run(A, CommonArgs),
    /// Help, completions or a manual page for stdout.
    Text(String),
    Version,
    Wrong(Failure),
}

fn command<A: Parser>(tool: &Tool) -> Command {
    fn furnish(command: Command, examples: &str) -> Command {
        let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
        let command =
            names.iter().fold(command, |command, name| command.mut_subcommand(name, |sub| furnish(sub, "")));
        if command.get_after_help().is_some() { command } else { command.after_help(after_help(examples)) }
    }
    furnish(A::command(), tool.examples).name(tool.name).bin_name(tool.name).version(tool.version)
}

fn parse<A: Parser>(tool: &Tool, argv: &[OsString]) -> Parsed<A> {
    let mut command = command::<A>(tool);
    match argv.get(1).and_then(|arg| arg.to_str()) {
        Some("completions") => return or_wrong(completions(tool, command, &argv[2..])),
        Some("man") => return or_wrong(manual(tool, command, &argv[2..])),
        _ => (),
    }
    let parsed = command.try_get_matches_from_mut(argv).and_then(|mut matches| {
        let flags = common(&matches);
        A::from_arg_matches_mut(&mut matches)
            .map(|args| (args, flags))
            .map_err(|error| error.format(&mut command))
    });
    match parsed {
        Ok((args, flags)) => Parsed::Run(args, flags),
        Err(error) => match error.kind() {
            ErrorKind::DisplayVersion => Parsed::Version,
            ErrorKind::DisplayHelp => Parsed::Text(error.render().to_string()),
            _ => {
                let text = error.render().to_string();
                let text = text.trim_end();
                Parsed::Wrong(Failure::usage(text.strip_prefix("error: ").unwrap_or(text)))
            }
        },
    }
}

/// The common options, wherever they stood. A tool that does not flatten them has none.
fn common(matches: &ArgMatches) -> CommonArgs {
    CommonArgs::from_arg_matches(matches).unwrap_or_default()
}

fn or_wrong<A>(text: Result<String, Failure>) -> Parsed<A> {
    text.map_or_else(Parsed::Wrong, Parsed::Text)
}

fn completions(tool: &Tool, mut command: Command, args: &[OsString]) -> Result<String, Failure> {
    let [shell] = args else { return Err(completions_usage(tool)) };
    let shell = shell
        .to_str()
        .and_then(|name| Shell::from_str(name, true).ok())
        .ok_or_else(|| completions_usage(tool))?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, tool.name, &mut script);
    Ok(String::from_utf8_lossy(&script).into_owned())
}

fn completions_usage(tool: &Tool) -> Failure {
    let shells: Vec<String> = Shell::value_variants().iter().map(ToString::to_string).collect();
    Failure::usage(format!(
        "usage: {} completions {} (a model called `completions` is written ./completions)",
        tool.name,
        shells.join("|")
    ))
}

fn manual(tool: &Tool, mut command: Command, args: &[OsString]) -> Result<String, Failure> {
    // Hands the global options down, so that the page of a subcommand has them.
    command.build();
    let names: Vec<String> = command
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
        .map(|sub| sub.get_name().to_owned())
        .collect();
    let page = match args {
        [] => Some(command),
        [name] => command.get_subcommands().find(|sub| name == sub.get_name()).map(|sub| {
            sub.clone().display_name(format!("{}-{}", tool.name, sub.get_name())).version(tool.version)
        }),
        _ => None,
    };
    let page = page.ok_or_else(|| {
        let subcommands = if names.is_empty() { String::new() } else { format!(" [{}]", names.join("|")) };
        Failure::usage(format!(
            "usage: {} man{subcommands} (a model called `man` is written ./man)",
            tool.name
        ))
    })?;
    let mut roff = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut roff)
        .map_err(|error| Failure::internal(format!("cannot render the manual page: {error}")))?;
    Ok(String::from_utf8_lossy(&roff).into_owned())
}

fn version(tool: &Tool, output: &Output) -> Result<(), Failure> {
    let details = if output.verbose() { (tool.details)() } else { Vec::new() };
    if output.json() {
        let mut object = serde_json::Map::new();
        object.insert("version".into(), tool.version.into());
        object.extend(details.into_iter().map(|(name, value)| (name.replace(' ', "_"), value.into())));
        return output.result(&object);
    }
    writeln!(output.text(), "{} {}", tool.name, tool.version)?;
    for (name, value) in details {
        writeln!(output.text(), "{name}: {value}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Subcommand;
    use serde_json::{Value, json};
    use std::path::PathBuf;

    #[derive(clap::Parser)]
    /// Does things to a model.
    struct Args {
        /// The model
        model: PathBuf,
        /// The prompt
        prompt: Option<String>,
        #[arg(long)]
        budget: Option<super::super::ByteSize>,
        #[command(flatten)]
        common: CommonArgs,
    }

    #[derive(clap::Parser)]
    struct Multi {
        #[command(subcommand)]
        command: Sub,
        #[command(flatten)]
        common: CommonArgs,
    }

    #[derive(Subcommand)]
    enum Sub {
        /// Evaluate
        Eval { model: PathBuf },
    }

    const TOOL: Tool = Tool {
        name: "waste-try",
        version: "1.2.3",
        schema: "waste-try/1",
        examples: "  waste-try k3.waste",
        details: || vec![("kernel", "avx2".to_owned())],
    };

    fn try_with(args: &[&str], run: impl FnOnce(Args, &Output) -> Result<Exit, Failure>) -> Captured {
        run_captured(TOOL, args, run)
    }

    fn never(_: Args, _: &Output) -> Result<Exit, Failure> {
        unreachable!("the command line should not have been accepted")
    }

    /// Parses the one JSON object on stdout.
    fn object(captured: &Captured) -> Value {
        let value: Value = serde_json::from_str(&captured.stdout).expect(&captured.stdout);
        assert!(captured.stdout.starts_with("{\"schema\":\""), "{}", captured.stdout);
        value
    }

    #[test]
    fn a_result_has_its_schema_first_and_keeps_f32_short() {
        #[derive(serde::Serialize)]
        struct Body {
            logit: f32,
        }
        let captured = try_with(&["m", "--json"], |args, output| {
            assert_eq!(args.model, PathBuf::from("m"));
            assert!(args.common.json && output.json());
            output.note("a note");
            output.detail("not shown");
            output.result(&Body { logit: 0.1 })?;
            Ok(Exit::No)
        });
        assert_eq!(captured.stdout, "{\"schema\":\"waste-try/1\",\"logit\":0.1}\n");
        assert_eq!((captured.exit, captured.stderr.as_str()), (Exit::No, "a note\n"));
    }

    #[test]
    fn quiet_silences_all_but_errors() {
        let captured = try_with(&["m", "-q"], |_, output| {
            output.note("note");
            output.warn("warning");
            Err(Failure::data("bad", "bad thing").with("layer", 3))
        });
        assert_eq!(captured.stderr, "waste-try: bad thing\n");
        assert_eq!((captured.exit, captured.stdout.as_str()), (Exit::Data, ""));
    }

    #[test]
    fn a_failure_is_one_object_also_after_a_result() {
        let captured = try_with(&["m", "--json"], |_, output| {
            output.set_schema("waste-try-eval/1");
            Err(Failure::interrupted())
        });
        assert_eq!(
            object(&captured),
            json!({"schema": "waste-try-eval/1", "error": {"code": "interrupted", "exit": 130, "message": "interrupted"}})
        );
        let captured = try_with(&["m", "--json"], |_, output| {
            output.result(&json!({"ok": true}))?;
            output.result(&json!({"ok": false}))?;
            Ok(Exit::Done)
        });
        assert_eq!((captured.exit, object(&captured)["ok"].clone()), (Exit::Internal, json!(true)));
    }

    #[test]
    fn control_characters_of_a_message_do_not_reach_the_terminal() {
        let captured = try_with(&["m"], |_, _| Err(Failure::data("x", "file \u{1b}[2J")));
        assert_eq!(captured.stderr, "waste-try: file \u{fffd}[2J\n");
    }

    #[test]
    fn wrong_usage_exits_2_with_an_object_when_json_is_anywhere() {
        for args in [
            &["--json", "--nonsense"][..],
            &["m", "--budget", "12X", "--json"],
            &["--json"],
            &["m", "p", "q", "--json"],
        ] {
            let captured = try_with(args, never);
            assert_eq!(captured.exit, Exit::Usage);
            let error = &object(&captured)["error"];
            assert_eq!((&error["code"], &error["exit"]), (&json!("usage"), &json!(2)));
            assert!(captured.stderr.starts_with("waste-try: "), "{}", captured.stderr);
        }
        let captured = try_with(&["m", "--budget=12X"], never);
        assert!(captured.stdout.is_empty() && captured.stderr.contains("46GiB"), "{}", captured.stderr);
        assert_eq!(try_with(&["m", "-q", "-v"], never).exit, Exit::Usage);
    }

    /// An option is never taken for the prompt; what follows `--` is never taken for an option.
    #[test]
    fn options_and_positionals_are_told_apart() {
        assert_eq!(try_with(&["m", "-3"], never).exit, Exit::Usage);
        assert_eq!(try_with(&["m", "--temprature"], never).exit, Exit::Usage);
        let captured = try_with(&["m", "--", "--json"], |args, output| {
            assert_eq!(args.prompt.as_deref(), Some("--json"));
            assert!(!output.json());
            Ok(Exit::Done)
        });
        assert_eq!(captured.exit, Exit::Done);
    }

    #[test]
    fn help_has_examples_and_the_table_of_exit_codes() {
        for args in [&["--help"][..], &["-h"]] {
            let help = try_with(args, never);
            assert_eq!(help.exit, Exit::Done);
            for words in
                ["Examples:\n  waste-try k3.waste", "  70  internal error", "powers of 1024", "--json"]
            {
                assert!(help.stdout.contains(words), "{}", help.stdout);
            }
        }
        let help = run_captured(TOOL, ["eval", "--help"], |_: Multi, _| unreachable!());
        assert!(help.stdout.contains("130 interrupted"), "{}", help.stdout);
    }

    #[test]
    fn version_has_more_lines_with_v_and_an_object_with_json() {
        assert_eq!(try_with(&["--version"], never).stdout, "waste-try 1.2.3\n");
        for args in [&["--version", "-v"][..], &["-v", "--version"], &["-vV"]] {
            assert_eq!(try_with(args, never).stdout, "waste-try 1.2.3\nkernel: avx2\n");
        }
        let captured = try_with(&["--version", "-v", "--json"], never);
        assert_eq!(object(&captured), json!({"schema": "waste-try/1", "version": "1.2.3", "kernel": "avx2"}));
    }

    #[test]
    fn completions_and_man_are_there_whatever_the_positionals() {
        for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
            let captured = try_with(&["completions", shell], never);
            assert!(
                captured.exit == Exit::Done && captured.stdout.contains("waste-try"),
                "{}",
                captured.stderr
            );
        }
        for args in [&["completions"][..], &["completions", "tcsh"], &["man", "nothing"]] {
            assert_eq!(try_with(args, never).exit, Exit::Usage);
        }
        let page = try_with(&["man"], never).stdout;
        assert!(page.contains(".TH waste-try 1") && page.contains("Exit codes"), "{page}");
        let page = run_captured(TOOL, ["man", "eval"], |_: Multi, _| unreachable!()).stdout;
        assert!(page.contains(".TH waste-try-eval 1") && page.contains("\\-\\-json"), "{page}");
    }

    #[test]
    fn common_options_work_before_and_after_a_subcommand() {
        for args in [["--json", "eval", "m"], ["eval", "--json", "m"], ["eval", "m", "--json"]] {
            let captured = run_captured(TOOL, args, |args: Multi, output| {
                let Sub::Eval { model } = args.command;
                assert!(output.json() && args.common.json && model.to_str() == Some("m"));
                Ok(Exit::Done)
            });
            assert_eq!(captured.exit, Exit::Done, "{}", captured.stderr);
        }
    }

    #[test]
    fn a_panic_exits_70_and_asks_for_a_report() {
        let captured = try_with(&["m", "--json"], |_, _| panic!("index {}", 7));
        assert_eq!(captured.exit, Exit::Internal);
        let message = object(&captured)["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("index 7") && message.contains("bug of waste-try"), "{message}");
    }

    /// A stdout that fails.
    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn a_reader_that_left_ends_the_tool_quietly_and_a_full_disk_does_not() {
        for (kind, exit) in
            [(io::ErrorKind::BrokenPipe, Exit::Done), (io::ErrorKind::StorageFull, Exit::Space)]
        {
            for args in [&["m"][..], &["m", "--json"], &["--help"], &["--version"]] {
                let stderr = Shared::default();
                let streams = Streams {
                    stdout: Box::new(Failing(kind)),
                    stderr: Box::new(stderr.clone()),
                    terminal: false,
                };
                let argv = [&["waste-try"], args].concat().iter().map(OsString::from).collect();
                let ended = execute(&TOOL, argv, streams, |_: Args, output: &Output| {
                    writeln!(output.text(), "text")?;
                    unreachable!("the write failed")
                });
                assert_eq!((ended, stderr.text().is_empty()), (exit, exit == Exit::Done));
            }
        }
    }

    #[test]
    fn an_earlier_error_passes_through_unchanged() {
        let earlier =
            r#"{"schema":"waste-download/1", "error":{"code":"http","exit":5,"message":"404","url":"x"}}"#;
        let run = |_: Args, _: &Output| {
            super::super::chain::Chained::read(format!("{earlier}\n").as_bytes(), "stdin")?;
            Ok(Exit::Done)
        };
        let captured = try_with(&["-", "--json"], run);
        assert_eq!(captured.stdout, format!("{earlier}\n"));
        assert_eq!((captured.exit, captured.stderr.as_str()), (Exit::Network, "waste-download: 404\n"));
        assert_eq!(try_with(&["-"], run).stdout, "");
    }
}
