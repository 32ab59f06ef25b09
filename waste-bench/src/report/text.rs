//! Aligned columns, for people.

use super::{Cell, Table};

/// Heading, tables, closing lines.
pub fn report(heading: &[String], tables: &[Table], closing: &[String]) -> String {
    let mut text: String = heading.iter().map(|line| format!("{line}\n")).collect();
    for table in tables.iter().filter(|table| !table.rows.is_empty()) {
        text.push_str(&format!("\n{}\n{}", table.title, rows(table)));
    }
    if !closing.is_empty() {
        text.push('\n');
    }
    closing.iter().for_each(|line| text.push_str(&format!("{line}\n")));
    text
}

fn rows(table: &Table) -> String {
    let mut lines: Vec<Vec<String>> =
        vec![table.columns.iter().map(|(title, _)| (*title).to_owned()).collect()];
    lines.extend(table.rows.iter().map(|row| row.iter().map(Cell::shown).collect()));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..table.columns.len()).map(width).collect();
    let words = |column: usize| table.rows.iter().any(|row| matches!(row[column], Cell::Text(_)));
    let left: Vec<bool> = (0..table.columns.len()).map(words).collect();
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> = line
            .iter()
            .enumerate()
            .map(|(column, cell)| {
                let width = widths[column];
                if left[column] { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            })
            .collect();
        text.push_str(&format!("  {}\n", cells.join("  ").trim_end()));
    }
    text
}

#[test]
fn golden() {
    let expected = "on a machine\n\
                    \n\
                    speed\n  \
                      arm         tok/s      read\n  \
                      a, \"b\" | c   0.33  3.00 MiB\n  \
                      b           12.00         –\n\
                    \n\
                    so it is\n";
    let found = report(&["on a machine".to_owned()], &[super::example()], &["so it is".to_owned()]);
    assert_eq!(found, expected);
}
