//! What a measurement found, in four forms: a table for people, JSON, CSV, Markdown.

mod csv;
mod markdown;
mod text;

use serde::Serialize;
use waste_common::cli::{ByteSize, Failure, Output};

/// How a result is written. `--json` is every tool's.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct FormatArgs {
    /// Print the rows as CSV
    #[arg(long, global = true, conflicts_with_all = ["json", "markdown"], help_heading = "Output")]
    pub csv: bool,
    /// Print the rows as a Markdown table, with what they were measured on, to paste into a report
    #[arg(long, global = true, conflicts_with = "json", help_heading = "Output")]
    pub markdown: bool,
}

/// One value of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Words.
    Text(String),
    /// A whole number.
    Count(u64),
    /// A number, shown with so many decimals.
    Number(f64, usize),
    /// Bytes, shown as GiB and the like.
    Bytes(u64),
    /// Nothing is known.
    None,
}

impl Cell {
    /// A number that may be missing.
    pub fn maybe(value: Option<f64>, decimals: usize) -> Cell {
        value.filter(|value| value.is_finite()).map_or(Cell::None, |value| Cell::Number(value, decimals))
    }

    /// For people.
    fn shown(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Count(count) => count.to_string(),
            Cell::Number(value, decimals) => format!("{value:.decimals$}"),
            Cell::Bytes(bytes) => ByteSize(*bytes).to_string(),
            Cell::None => "–".to_owned(),
        }
    }

    /// For programs: all digits, plain bytes, empty where nothing is known.
    fn raw(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Count(count) | Cell::Bytes(count) => count.to_string(),
            Cell::Number(value, _) => value.to_string(),
            Cell::None => String::new(),
        }
    }
}

/// Rows under named columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// What it shows, in a few words.
    pub title: &'static str,
    /// (title for people, name for programs)
    pub columns: Vec<(&'static str, &'static str)>,
    /// As many cells a row as there are columns.
    pub rows: Vec<Vec<Cell>>,
}

/// A finished measurement.
pub struct Report<'a, R> {
    /// Lines that say what was measured and on what.
    pub heading: Vec<String>,
    /// The rows; the first table is the one CSV takes.
    pub tables: Vec<Table>,
    /// Lines that say what follows.
    pub closing: Vec<String>,
    /// All of it, for `--json`.
    pub record: &'a R,
}

/// Writes a report in the form that was asked for.
///
/// # Errors
/// Standard output is closed or fails.
pub fn emit<R: Serialize>(
    output: &Output,
    format: FormatArgs,
    report: &Report<'_, R>,
) -> Result<(), Failure> {
    if output.json() {
        return output.result(report.record);
    }
    let text = if format.csv {
        report.tables.first().map(csv::table).unwrap_or_default()
    } else if format.markdown {
        markdown::report(&report.heading, &report.tables, &report.closing)
    } else {
        text::report(&report.heading, &report.tables, &report.closing)
    };
    output.text().write_all(text.as_bytes())
}

#[cfg(test)]
pub(crate) fn example() -> Table {
    Table {
        title: "speed",
        columns: vec![("arm", "arm"), ("tok/s", "tokens_per_second"), ("read", "bytes_read")],
        rows: vec![
            vec![Cell::Text("a, \"b\" | c".to_owned()), Cell::Number(1.0 / 3.0, 2), Cell::Bytes(3 << 20)],
            vec![Cell::Text("b".to_owned()), Cell::Number(12.0, 2), Cell::None],
        ],
    }
}
