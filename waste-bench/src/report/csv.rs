//! Comma-separated values, RFC 4180 with plain line feeds.

use super::Table;

/// A header of names and a line a row.
pub fn table(table: &Table) -> String {
    let header = table.columns.iter().map(|(_, name)| field(name));
    let rows = table.rows.iter().map(|row| line(row.iter().map(|cell| field(&cell.raw()))));
    std::iter::once(line(header)).chain(rows).collect()
}

fn line(fields: impl Iterator<Item = String>) -> String {
    let mut line = fields.collect::<Vec<_>>().join(",");
    line.push('\n');
    line
}

fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_owned()
}

#[test]
fn golden() {
    let expected = "arm,tokens_per_second,bytes_read\n\
                    \"a, \"\"b\"\" | c\",0.3333333333333333,3145728\n\
                    b,12,\n";
    assert_eq!(table(&super::example()), expected);
}
