//! What stands between a marker and `<|sep|>`: a name, and attributes.

/// Longest header, in bytes.
const BYTES_MAX: usize = 4096;

/// A header being read.
#[derive(Clone, Debug)]
pub struct Header {
    /// After `<|close|>`, not `<|open|>`.
    pub closes: bool,
    text: String,
}

impl Header {
    pub fn new(closes: bool) -> Header {
        Header { closes, text: String::new() }
    }

    /// Takes more text; false if that makes it too long.
    pub fn push(&mut self, text: &str) -> bool {
        self.text.push_str(text);
        self.text.len() <= BYTES_MAX
    }

    pub fn name(&self) -> &str {
        self.split().0
    }

    fn split(&self) -> (&str, &str) {
        self.text.split_at(self.text.find(char::is_whitespace).unwrap_or(self.text.len()))
    }

    /// The value of the first attribute with this key.
    pub fn attribute(&self, key: &str) -> Option<String> {
        let mut rest = self.split().1;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let (value, after) = after.split_once('"')?;
            if name.trim_start() == key {
                return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
            }
            rest = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_attributes() {
        let mut header = Header::new(false);
        assert!(header.push("call tool=\"a&amp;quot;b\" x='1' tool=\"c\"\n index=\"2\" open=\"never"));
        assert_eq!(header.name(), "call");
        assert_eq!(header.attribute("tool").unwrap(), "a&quot;b");
        assert_eq!(header.attribute("index").unwrap(), "2");
        assert_eq!((header.attribute("open"), header.attribute("all tool")), (None, None));
        assert!(!header.push(&"x".repeat(BYTES_MAX)));
        assert_eq!(Header::new(true).name(), "");
    }
}
