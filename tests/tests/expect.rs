//! The README's "what to expect" is what waste-plan says. After a change: `UPDATE=1 cargo test -p waste-tests --test
//! expect`.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use waste_tests::tool::{Ran, emulated, run};

const BEGIN: &str = "<!-- what waste-plan says; tests/tests/expect.rs writes it -->\n";
const END: &str = "<!-- end -->\n";
const MODELS: [(&str, &str); 2] = [("kimi-k3", "Kimi K3"), ("kimi-linear-48b", "Kimi-Linear-48B")];
const RAM_GIB: [u64; 5] = [16, 32, 64, 96, 128];
/// 10^9 bytes a second: a USB or network disk, a SATA or older NVMe one, a usual one, the fastest.
const DISKS: [f64; 4] = [1.0, 3.0, 7.0, 12.0];
/// Vectors of 8 weights that a core with AVX-512 encodes a second at the default effort; see docs/encoders.md.
const VECTORS_PER_SECOND: f64 = 2.3e6;
const CORES: f64 = 8.0;
/// Bytes a second of a line of 1 Gbit/s.
const LINE: f64 = 125e6;

fn plan(model: &str, ram: u64, budget: &str, gbps: f64) -> Result<Value, Ran> {
    let (ram, gbps) = (format!("{ram}GiB"), gbps.to_string());
    let args = [model, "--ram", &ram, "--budget", budget, "--threads", "8", "--disk-gbps", &gbps, "--json"];
    let ran = run("waste-plan", args);
    if matches!(ran.exit, Some(0 | 1)) { Ok(ran.json("waste-plan/1")) } else { Err(ran) }
}

fn gib(bytes: &Value) -> String {
    format!("{:.1} GiB", bytes.as_f64().unwrap() / (1u64 << 30) as f64)
}

/// Hours, or minutes where they are few.
fn hours(seconds: f64) -> String {
    let hours = seconds / 3600.0;
    if hours < 1.0 { format!("{:.0} min", (60.0 * hours).ceil()) } else { format!("{hours:.1} h") }
}

fn tables() -> String {
    let mut text = String::new();
    let disks = DISKS.map(|gbps| format!("{gbps}")).join(" / ");
    writeln!(text, "| model | RAM | | budget | a token needs | tokens/s at {disks} GB/s | `--budget max` |")
        .unwrap();
    writeln!(text, "|---|---|---|---|---|---|---|").unwrap();
    for (model, name) in MODELS {
        for ram in RAM_GIB {
            let auto = DISKS.into_iter().map(|gbps| plan(model, ram, "auto", gbps));
            let plans = match auto.collect::<Result<Vec<Value>, Ran>>() {
                Ok(plans) => plans,
                Err(ran) => {
                    ran.error(4, "not_enough_ram");
                    writeln!(text, "| {name} | {ram} GiB | does not run | | | | |").unwrap();
                    continue;
                }
            };
            let (first, most) = (&plans[0], plan(model, ram, "max", 1.0).unwrap());
            let fits = first["fits"] == true;
            let word = if fits { "fits" } else { "pages: not usable" };
            let rates = plans.iter().map(|plan| places(plan["tokens_per_second_max"].as_f64().unwrap()));
            let rates = if fits { rates.collect::<Vec<_>>().join(" / ") } else { String::new() };
            let all = if most["bytes_per_token"] == 0 { ", all experts" } else { "" };
            let most = if fits { format!("{}{all}", gib(&most["budget_bytes"])) } else { String::new() };
            let (budget, needs) = (gib(&first["budget_bytes"]), gib(&first["bytes_per_token"]));
            writeln!(text, "| {name} | {ram} GiB | {word} | {budget} | {needs} | {rates} | {most} |")
                .unwrap();
        }
    }
    writeln!(text, "\n| model | checkpoint | container | download at 1 Gbit/s | conversion, {CORES} cores |")
        .unwrap();
    writeln!(text, "|---|---|---|---|---|").unwrap();
    for (model, name) in MODELS {
        let plan = plan(model, 128, "auto", 1.0).unwrap();
        let download = plan["checkpoint_bytes"].as_f64().unwrap() / LINE;
        // Three bits a weight, eight weights a vector: a vector in three bytes.
        let convert = plan["experts_bytes"].as_f64().unwrap() / 3.0 / VECTORS_PER_SECOND / CORES;
        let (checkpoint, container) = (gib(&plan["checkpoint_bytes"]), gib(&plan["container_bytes"]));
        let (download, convert) = (hours(download), hours(convert));
        writeln!(text, "| {name} | {checkpoint} | {container} | {download} | {convert} |").unwrap();
    }
    text
}

/// Two digits that say something.
fn places(rate: f64) -> String {
    if rate < 1.0 {
        format!("{rate:.2}")
    } else if rate < 10.0 {
        format!("{rate:.1}")
    } else {
        format!("{rate:.0}")
    }
}

#[test]
fn the_readme_says_what_waste_plan_says() {
    if emulated() {
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let begin = readme.find(BEGIN).unwrap() + BEGIN.len();
    let end = readme[begin..].find(END).unwrap() + begin;
    let expected = format!("\n{}\n", tables());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, format!("{}{expected}{}", &readme[..begin], &readme[end..])).unwrap();
        return;
    }
    assert!(readme[begin..end] == expected, "README.md is stale; it should say\n{expected}");
}
