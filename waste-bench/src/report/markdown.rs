//! Markdown, to paste into a report.

use super::{Cell, Table};

/// Heading as a list, tables, closing lines.
pub fn report(heading: &[String], tables: &[Table], closing: &[String]) -> String {
    let mut text: String = heading.iter().map(|line| format!("- {line}\n")).collect();
    for table in tables.iter().filter(|table| !table.rows.is_empty()) {
        text.push_str(&format!("\n**{}**\n\n{}", table.title, rows(table)));
    }
    closing.iter().for_each(|line| text.push_str(&format!("\n{line}\n")));
    text
}

fn rows(table: &Table) -> String {
    let header = line(table.columns.iter().map(|(title, _)| (*title).to_owned()));
    let numeric = |column: usize| table.rows.iter().all(|row| !matches!(row[column], Cell::Text(_)));
    let rule = (0..table.columns.len()).map(|column| if numeric(column) { "---:" } else { "---" }.to_owned());
    let rows = table.rows.iter().map(|row| line(row.iter().map(|cell| cell.shown().replace('|', "\\|"))));
    [header, line(rule)].into_iter().chain(rows).collect()
}

fn line(cells: impl Iterator<Item = String>) -> String {
    format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
}

#[test]
fn golden() {
    let expected = "- on a machine\n\
                    \n\
                    **speed**\n\
                    \n\
                    | arm | tok/s | read |\n\
                    | --- | ---: | ---: |\n\
                    | a, \"b\" \\| c | 0.33 | 3.00 MiB |\n\
                    | b | 12.00 | – |\n\
                    \n\
                    so it is\n";
    let found = report(&["on a machine".to_owned()], &[super::example()], &["so it is".to_owned()]);
    assert_eq!(found, expected);
}
