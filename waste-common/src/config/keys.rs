//! Typed access to JSON objects.

use serde_json::{Map, Value};

use super::ConfigError;

pub(super) fn object<'a>(key: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ConfigError> {
    value.as_object().ok_or_else(|| ConfigError::Invalid {
        key: key.to_owned(),
        found: brief(value),
        expected: "an object".to_owned(),
    })
}

pub(super) fn missing(key: &str) -> ConfigError {
    ConfigError::Missing { key: key.to_owned() }
}

/// A value as it may stand in a message: short, whatever it is.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Typed access to one JSON object. Absent and null are the same, present values are checked.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn invalid(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Invalid {
            key: key.to_owned(),
            found: self.0.get(key).map_or_else(|| "absent".to_owned(), brief),
            expected: expected.to_owned(),
        }
    }

    pub(super) fn unsupported(&self, key: &str, implemented: &str) -> ConfigError {
        ConfigError::Unsupported {
            key: key.to_owned(),
            found: self.0.get(key).map_or_else(|| "absent".to_owned(), brief),
            implemented: implemented.to_owned(),
        }
    }

    pub(super) fn optional(&self, key: &str, max: u64) -> Result<Option<u64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n <= max => Ok(Some(n)),
            _ => Err(self.invalid(key, &format!("a whole number from 0 to {max}"))),
        }
    }

    /// A dimension that may be absent or null, and is never 0.
    pub(super) fn optional_size(&self, key: &str, max: u64) -> Result<Option<usize>, ConfigError> {
        match self.optional(key, max)? {
            Some(0) => Err(self.invalid(key, &format!("a whole number from 1 to {max}"))),
            found => Ok(found.map(|n| n as usize)),
        }
    }

    pub(super) fn size(&self, key: &str, max: u64) -> Result<usize, ConfigError> {
        self.optional_size(key, max)?.ok_or_else(|| missing(key))
    }

    pub(super) fn boolean(&self, key: &str, absent: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(absent),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(self.invalid(key, "true or false")),
        }
    }

    pub(super) fn demand_bool(&self, key: &str, wanted: bool, implemented: &str) -> Result<(), ConfigError> {
        if self.boolean(key, !wanted)? == wanted { Ok(()) } else { Err(self.unsupported(key, implemented)) }
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if (x as f32).is_finite() => Ok(Some(x as f32)),
            _ => Err(self.invalid(key, "a number")),
        }
    }

    pub(super) fn word(&self, key: &str, absent: &'static str) -> Result<&'a str, ConfigError> {
        match self.get(key) {
            None => Ok(absent),
            Some(Value::String(word)) => Ok(word),
            Some(_) => Err(self.invalid(key, "a word")),
        }
    }
}
