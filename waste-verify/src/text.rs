//! The result for people.

use std::fmt::Write;

use waste_common::cli::{ByteSize, Failure, Output};

use crate::report::Report;
use crate::source::SourceReport;

/// Prints the result on stdout, notes on stderr.
pub(crate) fn print(report: &Report, output: &Output) -> Result<(), Failure> {
    for note in &report.notes {
        output.note(format_args!("{}: {}", printable(&note.file), printable(&note.message)));
    }
    output.text().write_all(render(report, output.verbose()).as_bytes())
}

fn render(report: &Report, verbose: bool) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_report(&mut text, report, verbose);
    text
}

fn write_report(text: &mut String, report: &Report, verbose: bool) -> std::fmt::Result {
    for problem in &report.problems {
        writeln!(text, "{}", printable(&problem.to_string()))?;
    }
    let unlisted = report.problem_count - report.problems.len() as u64;
    if unlisted > 0 {
        writeln!(text, "… and {unlisted} more problems")?;
    }
    if let Some(source) = &report.source {
        write_source(text, source, verbose)?;
    }
    for repaired in &report.repaired {
        let parts = repaired.parts.map_or("whole".to_owned(), |parts| format!("{parts} parts"));
        writeln!(text, "{}: copied, {parts}, {}", printable(&repaired.file), ByteSize(repaired.bytes))?;
    }
    match report.sealed {
        Some(true) => writeln!(text, "sealed: checksums have been added")?,
        Some(false) if report.ok => writeln!(text, "it had its checksums already")?,
        Some(false) => writeln!(text, "NOT sealed: only a sound container is")?,
        None => {}
    }
    let rate = ByteSize((report.bytes as f64 / report.seconds.max(1e-3)) as u64);
    let speed = if report.mode == "full" { format!(", {rate}/s") } else { String::new() };
    writeln!(
        text,
        "{} files, {}; {} layers, {} experts, {} trunk tensors; {:.1} s{speed}",
        report.files,
        ByteSize(report.bytes),
        report.layers,
        report.experts,
        report.tensors,
        report.seconds
    )?;
    writeln!(text, "manifest sha256 {}", report.manifest_sha256)?;
    if !report.unprotected.is_empty() {
        let shown = if verbose { report.unprotected.len() } else { report.unprotected.len().min(8) };
        let mut parts = report.unprotected[..shown].join(", ");
        if shown < report.unprotected.len() {
            write!(parts, " and {} more (-v lists them)", report.unprotected.len() - shown)?;
        }
        writeln!(text, "without a checksum: {}", printable(&parts))?;
    }
    let container = printable(&report.container);
    match (report.ok, report.mode) {
        (true, "quick") => writeln!(text, "{container}: headers and sizes are sound; payloads were not read"),
        (true, _) if report.unprotected.is_empty() => writeln!(text, "{container}: sound"),
        (true, _) => writeln!(text, "{container}: sound as far as checksums reach"),
        (false, _) => writeln!(
            text,
            "{container}: NOT sound, {} problem{}; fetch the named files again, or convert the named layers again",
            report.problem_count,
            if report.problem_count == 1 { "" } else { "s" }
        ),
    }
}

fn write_source(text: &mut String, source: &SourceReport, verbose: bool) -> std::fmt::Result {
    writeln!(text, "relative error against {}:", printable(&source.checkpoint))?;
    for (fmt, trunk) in &source.trunk {
        writeln!(
            text,
            "  trunk {fmt}: {:.3e} over {} tensors, worst {:.3e} ({})",
            trunk.error,
            trunk.tensors,
            trunk.worst,
            printable(&trunk.worst_tensor)
        )?;
    }
    for layer in source.layers.iter().filter(|_| verbose) {
        let error = &layer.error;
        writeln!(
            text,
            "  layer {}: gate {:.4}, up {:.4}, down {:.4} over {} experts",
            layer.layer, error.gate, error.up, error.down, layer.experts
        )?;
    }
    if let Some(error) = &source.error {
        writeln!(
            text,
            "  experts: gate {:.4}, up {:.4}, down {:.4} over {} experts of {} layers",
            error.gate,
            error.up,
            error.down,
            source.experts,
            source.layers.len()
        )?;
    }
    Ok(())
}

/// Names come from outside: no control character of theirs reaches the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
