//! JSON as the model saw it in training: keys in their order, integers of any size, floats in one spelling.
//!
//! serde_json's `Value` cannot hold this without a feature that changes numbers for every user of the crate in the
//! build, so the few lines of grammar are here; strings are left to serde_json.

use std::fmt::Write;

use indexmap::IndexMap;

/// Deepest nesting that is read, serde_json's own limit.
pub const DEPTH_MAX: usize = 128;
/// Most values in a text: the token ids of the longest context, twice. A value takes many times the memory of its text.
pub const VALUES_MAX: usize = 1 << 21;

/// An object: keys in the order given; of a key given twice, the first place and the last value.
pub type Object = IndexMap<String, Json>;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number.
    Number(Number),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<Json>),
    /// An object.
    Object(Object),
}

/// A number, as the text it is written with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number(String);

/// Why a text is no JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not valid JSON at byte {at}: {why}")]
pub struct JsonSyntax {
    /// Bytes before it.
    pub at: usize,
    /// What is wrong there.
    pub why: String,
}

/// How values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Every object's keys sorted, no space.
    Sorted,
    /// Keys in their order, no space.
    Compact,
    /// Keys in their order, a space after `,` and `:`.
    Spaced,
}

impl Json {
    /// Reads exactly one value, with white space around it.
    ///
    /// # Errors
    /// Anything else, lone surrogates, numbers beyond the range of doubles (unless whole), nesting beyond 128, more than
    /// [`VALUES_MAX`] values.
    pub fn parse(text: &str) -> Result<Json, JsonSyntax> {
        let mut parser = Parser { text, at: 0, values: 0 };
        let value = parser.value(DEPTH_MAX)?;
        parser.blank();
        if parser.at < text.len() {
            return Err(parser.error("the value is over, but the text is not"));
        }
        Ok(value)
    }

    /// The same from bytes, which must be UTF-8.
    ///
    /// # Errors
    /// As for [`Json::parse`].
    pub fn from_slice(bytes: &[u8]) -> Result<Json, JsonSyntax> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| JsonSyntax { at: error.valid_up_to(), why: "not UTF-8".to_owned() })?;
        Json::parse(text)
    }

    /// The value's text.
    pub fn text(&self, style: Style) -> String {
        let mut out = String::new();
        self.write(style, &mut out);
        out
    }

    fn write(&self, style: Style, out: &mut String) {
        let (comma, colon) = match style {
            Style::Sorted | Style::Compact => (",", ":"),
            Style::Spaced => (", ", ": "),
        };
        match self {
            Json::Null => out.push_str("null"),
            Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Json::Number(Number(text)) => out.push_str(text),
            Json::String(text) => push_string(out, text),
            Json::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { comma });
                    item.write(style, out);
                }
                out.push(']');
            }
            Json::Object(object) => {
                let mut entries: Vec<_> = object.iter().collect();
                if style == Style::Sorted {
                    // The order of UTF-8 bytes is that of code points.
                    entries.sort_unstable_by_key(|entry| entry.0);
                }
                out.push('{');
                for (i, (key, value)) in entries.into_iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { comma });
                    push_string(out, key);
                    out.push_str(colon);
                    value.write(style, out);
                }
                out.push('}');
            }
        }
    }

    /// The value of a key, of an object that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.as_object()?.get(key)
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(text) => Some(text),
            _ => None,
        }
    }

    /// The truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Json::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The number as a double.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Json::Number(Number(text)) => text.parse().ok(),
            _ => None,
        }
    }

    /// The number, if it is written as a whole one and small enough.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Json::Number(Number(text)) => text.parse().ok(),
            _ => None,
        }
    }

    /// The items of a list.
    pub fn as_array(&self) -> Option<&[Json]> {
        match self {
            Json::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The entries of an object.
    pub fn as_object(&self) -> Option<&Object> {
        match self {
            Json::Object(object) => Some(object),
            _ => None,
        }
    }

    /// Whether it is `null`.
    pub fn is_null(&self) -> bool {
        *self == Json::Null
    }

    /// `null`, `boolean`, `number`, `string`, `array` or `object`.
    pub fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "boolean",
            Json::Number(_) => "number",
            Json::String(_) => "string",
            Json::Array(_) => "array",
            Json::Object(_) => "object",
        }
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::String(text.to_owned())
    }
}

/// A string between its quotes, with the escapes that JSON needs and no others.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    push_string(&mut out, text);
    out
}

fn push_string(out: &mut String, text: &str) {
    out.push('"');
    push_escaped(out, text);
    out.push('"');
}

/// What stands between the quotes.
pub(crate) fn push_escaped(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => {
                // Writing to a string does not fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
}

impl Number {
    /// A number of JSON's grammar; `None` for anything else, and for a float beyond the range of doubles.
    pub fn parse(text: &str) -> Option<Number> {
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let unsigned = text.strip_prefix('-').unwrap_or(text);
        let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, Some(exponent)),
            None => (unsigned, None),
        };
        let (whole, fraction) = match mantissa.split_once('.') {
            Some((whole, fraction)) => (whole, Some(fraction)),
            None => (mantissa, None),
        };
        let sound = digits(whole)
            && (whole == "0" || !whole.starts_with('0'))
            && fraction.is_none_or(digits)
            && exponent.is_none_or(|exponent| digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent)));
        if !sound {
            return None;
        }
        if fraction.is_none() && exponent.is_none() {
            return Some(Number(if text == "-0" { "0" } else { text }.to_owned()));
        }
        let value: f64 = text.parse().ok()?;
        value.is_finite().then(|| Number(float_text(value)))
    }
}

/// The shortest digits that read back as `value`; plain for decimal exponents of -4 to 15.
fn float_text(value: f64) -> String {
    // Rust's digits are the shortest too; only their layout differs.
    let text = format!("{value:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(mantissa) => ("-", mantissa),
        None => ("", mantissa),
    };
    if !(-4..=15).contains(&exponent) {
        let direction = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{mantissa}e{direction}{:02}", exponent.unsigned_abs());
    }
    let digits = mantissa.replace('.', "");
    let places = exponent.unsigned_abs() as usize;
    if exponent < 0 {
        return format!("{sign}0.{}{digits}", "0".repeat(places - 1));
    }
    let padded = format!("{digits:0<width$}", width = places + 2);
    let (whole, fraction) = padded.split_at(places + 1);
    format!("{sign}{whole}.{fraction}")
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    values: usize,
}

impl Parser<'_> {
    fn error(&self, why: impl Into<String>) -> JsonSyntax {
        JsonSyntax { at: self.at, why: why.into() }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn blank(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Takes a byte if it is the next one after white space.
    fn take(&mut self, byte: u8) -> bool {
        self.blank();
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonSyntax> {
        self.blank();
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(self.error(format!("more than {VALUES_MAX} values")));
        }
        match self.peek() {
            Some(b'"') => Ok(Json::String(self.string()?)),
            Some(b'{' | b'[') if depth == 0 => Err(self.error("nested too deep")),
            Some(b'{') => self.object(depth - 1),
            Some(b'[') => self.array(depth - 1),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                let words = [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))];
                let rest = &self.text.as_bytes()[self.at..];
                match words.into_iter().find(|(word, _)| rest.starts_with(word.as_bytes())) {
                    Some((word, value)) => {
                        self.at += word.len();
                        Ok(value)
                    }
                    None => Err(self.error("expected a value")),
                }
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonSyntax> {
        self.at += 1;
        let mut object = Object::new();
        if self.take(b'}') {
            return Ok(Json::Object(object));
        }
        loop {
            self.blank();
            if self.peek() != Some(b'"') {
                return Err(self.error("expected a key"));
            }
            let key = self.string()?;
            if !self.take(b':') {
                return Err(self.error("expected `:`"));
            }
            let value = self.value(depth)?;
            object.insert(key, value);
            if self.take(b'}') {
                return Ok(Json::Object(object));
            }
            if !self.take(b',') {
                return Err(self.error("expected `,` or `}`"));
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Json, JsonSyntax> {
        self.at += 1;
        let mut items = Vec::new();
        if self.take(b']') {
            return Ok(Json::Array(items));
        }
        loop {
            items.push(self.value(depth)?);
            if self.take(b']') {
                return Ok(Json::Array(items));
            }
            if !self.take(b',') {
                return Err(self.error("expected `,` or `]`"));
            }
        }
    }

    fn number(&mut self) -> Result<Json, JsonSyntax> {
        let rest = &self.text[self.at..];
        let is_part = |c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.' | 'e' | 'E');
        let text = &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())];
        let number = Number::parse(text).ok_or_else(|| self.error("not a number, or one out of range"))?;
        self.at += text.len();
        Ok(Json::Number(number))
    }

    fn string(&mut self) -> Result<String, JsonSyntax> {
        let bytes = self.text.as_bytes();
        let mut end = self.at + 1;
        loop {
            match bytes.get(end) {
                Some(b'"') => break,
                Some(b'\\') => end += 2,
                Some(_) => end += 1,
                None => return Err(self.error("the string has no end")),
            }
        }
        let token = &self.text[self.at..=end];
        let text = serde_json::from_str(token).map_err(|error| self.error(error.to_string()))?;
        self.at = end + 1;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_text_has_values_without_bound() {
        let list = |values: usize| format!("[{}0]", "0,".repeat(values - 1));
        assert!(Json::parse(&list(VALUES_MAX - 1)).is_ok());
        assert!(Json::parse(&list(VALUES_MAX)).unwrap_err().why.starts_with("more than"));
    }

    #[test]
    fn numbers_have_one_spelling() {
        for (given, written) in [
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1e5", "100000.0"),
            ("1E+2", "100.0"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.25e22", "1.25e+22"),
            ("5e-324", "5e-324"),
            ("-1234.5e-1", "-123.45"),
            ("2.50", "2.5"),
            ("0e7", "0.0"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("9007199254740993.0", "9007199254740992.0"),
        ] {
            assert_eq!(Json::parse(given).unwrap().text(Style::Spaced), written, "{given}");
        }
        for wrong in
            ["", "-", "01", "+1", ".5", "1.", "1e", "1e+", "--1", "1e999", "0x1", "NaN", "-Infinity", "1.2.3"]
        {
            assert!(Json::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn order_and_duplicates() {
        let value =
            Json::parse(r#" {"z":1, "a":[true,null,{"é":"\u0007\/"}], "z":{"y":2,"b":[]}} "#).unwrap();
        assert_eq!(
            value.text(Style::Spaced),
            r#"{"z": {"y": 2, "b": []}, "a": [true, null, {"é": "\u0007/"}]}"#
        );
        assert_eq!(value.text(Style::Sorted), r#"{"a":[true,null,{"é":"\u0007/"}],"z":{"b":[],"y":2}}"#);
    }

    #[test]
    fn depth_and_surrogates_are_refused() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(Json::parse(&nested(DEPTH_MAX)).is_ok());
        assert!(Json::parse(&nested(DEPTH_MAX + 1)).is_err());
        assert!(Json::parse(&"[".repeat(1 << 20)).is_err());
        assert!(Json::parse(r#""\ud800""#).is_err());
        assert_eq!(Json::parse(r#""\ud83d\ude42""#), Ok(Json::from("🙂")));
    }

    /// Texts that are often JSON, or nearly.
    fn nearly_json() -> impl Strategy<Value = String> {
        let pieces = vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"a\"",
            "\"\\u00e9\"",
            "\"é\\n\"",
            "1",
            "-2.5e3",
            "0",
            "true",
            "null",
            " ",
            "\n",
            "\\",
            "\"",
            "x",
            "é",
        ];
        proptest::collection::vec(proptest::sample::select(pieces), 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn accepts_what_serde_json_accepts_and_reads_the_same(text in nearly_json()) {
            let theirs: Result<serde_json::Value, _> = serde_json::from_str(&text);
            let ours = Json::parse(&text);
            prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?} {:?}", ours, theirs);
            if let (Ok(ours), Ok(theirs)) = (ours, theirs) {
                let again: serde_json::Value = serde_json::from_str(&ours.text(Style::Spaced)).unwrap();
                prop_assert_eq!(&again, &theirs);
                let again: serde_json::Value = serde_json::from_str(&ours.text(Style::Sorted)).unwrap();
                prop_assert_eq!(&again, &theirs);
            }
        }

        #[test]
        fn floats_read_back(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            let text = float_text(value);
            prop_assert_eq!(text.parse::<f64>().unwrap().to_bits(), bits, "{}", text);
            prop_assert!(Number::parse(&text) == Some(Number(text)));
        }

        #[test]
        fn strings_are_escaped_as_serde_json_does(text in ".*|[\0-\u{ff}]*") {
            prop_assert_eq!(quoted(&text), serde_json::to_string(&text).unwrap());
        }
    }
}
