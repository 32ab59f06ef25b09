//! Fields of a request, each read as what it has to be.

use std::collections::BTreeMap;

use waste_engine::chat::Json;

use crate::error::ApiError;

/// A request's object.
#[derive(Clone, Copy)]
pub struct Fields<'a>(&'a Json);

fn wrong_type(param: &str, expected: &str, found: &Json) -> ApiError {
    ApiError::bad("invalid_type", param, format!("{param}: expected {expected}, found {}", found.kind()))
}

impl<'a> Fields<'a> {
    /// The body of a request.
    ///
    /// # Errors
    /// It is no object.
    pub fn new(json: &'a Json) -> Result<Fields<'a>, ApiError> {
        match json.as_object() {
            Some(_) => Ok(Fields(json)),
            None => Err(ApiError::bad("invalid_type", "body", "the body must be a JSON object")),
        }
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Json> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| wrong_type(name, expected, value)),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// It is something else; so for the other getters.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Json::as_str)
    }

    /// A truth value.
    ///
    /// # Errors
    /// See [`text`](Self::text).
    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Json::as_bool)
    }

    /// A list.
    ///
    /// # Errors
    /// See [`text`](Self::text).
    pub fn list(&self, name: &str) -> Result<Option<&'a [Json]>, ApiError> {
        self.read(name, "a list", Json::as_array)
    }

    /// An object.
    ///
    /// # Errors
    /// See [`text`](Self::text).
    pub fn object(&self, name: &str) -> Result<Option<&'a Json>, ApiError> {
        self.read(name, "an object", |value| value.as_object().map(|_| value))
    }

    /// A whole number of a range.
    ///
    /// # Errors
    /// See [`text`](Self::text); or outside the range.
    pub fn whole(&self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.read(name, "a whole number", Json::as_i64)? else { return Ok(None) };
        if !(low..=high).contains(&value) {
            return Err(ApiError::value(name, format!("{name} is {value}; expected {low} to {high}")));
        }
        Ok(Some(value))
    }

    /// A number of a range.
    ///
    /// # Errors
    /// See [`whole`](Self::whole).
    pub fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.read(name, "a number", Json::as_f64)? else { return Ok(None) };
        if !(low..=high).contains(&value) {
            return Err(ApiError::value(name, format!("{name} is {value}; expected {low} to {high}")));
        }
        Ok(Some(value))
    }

    /// A string or a list of them.
    ///
    /// # Errors
    /// See [`text`](Self::text).
    pub fn texts(&self, name: &str) -> Result<Vec<String>, ApiError> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Json::String(text)) => Ok(vec![text.clone()]),
            Some(Json::Array(list)) => list
                .iter()
                .map(|item| {
                    let text = item.as_str().ok_or_else(|| wrong_type(name, "a list of strings", item))?;
                    Ok(text.to_owned())
                })
                .collect(),
            Some(other) => Err(wrong_type(name, "a string or a list of strings", other)),
        }
    }

    /// Token ids and what is added to their logits.
    ///
    /// # Errors
    /// See [`text`](Self::text); or an id that there is not.
    pub fn biases(&self, name: &str, vocab: usize) -> Result<BTreeMap<u32, f64>, ApiError> {
        let Some(object) = self.object(name)?.and_then(Json::as_object) else { return Ok(BTreeMap::new()) };
        let bias = |(id, bias): (&String, &Json)| {
            let bias = bias.as_f64().ok_or_else(|| wrong_type(name, "numbers as values", bias))?;
            let id: u32 = id.parse().ok().filter(|id| (*id as usize) < vocab).ok_or_else(|| {
                ApiError::value(name, format!("{name}: {id:?} is no token id below {vocab}"))
            })?;
            if !(-100.0..=100.0).contains(&bias) {
                return Err(ApiError::value(name, format!("{name} of {id} is {bias}; expected -100 to 100")));
            }
            Ok((id, bias))
        };
        object.iter().map(bias).collect()
    }

    /// Refuses fields that mean something this server does not do.
    ///
    /// # Errors
    /// The first of them that is there.
    pub fn refuse(&self, fields: &[(&str, &str)]) -> Result<(), ApiError> {
        match fields.iter().find(|(name, _)| self.get(name).is_some()) {
            Some((name, why)) => Err(ApiError::unsupported(name, format!("{name}: {why}"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_types_name_their_field() {
        let json =
            Json::parse(r#"{"a":1,"b":"x","c":null,"d":[1],"e":1.5,"f":{"x":1},"g":{"1":"y"},"h":{"1":3}}"#)
                .unwrap();
        let fields = Fields::new(&json).unwrap();
        assert_eq!(fields.whole("a", 0, 5).unwrap(), Some(1));
        assert_eq!(fields.text("c").unwrap(), None);
        for error in [
            fields.text("a").unwrap_err(),
            fields.whole("b", 0, 1).unwrap_err(),
            fields.whole("e", 0, 5).unwrap_err(),
            fields.bool("a").unwrap_err(),
            fields.number("b", 0.0, 1.0).unwrap_err(),
            fields.texts("d").unwrap_err(),
            fields.list("a").unwrap_err(),
            fields.biases("g", 10).unwrap_err(),
        ] {
            assert_eq!((error.code, error.status.as_u16()), ("invalid_type", 400));
            assert!(error.param.is_some());
        }
        assert_eq!(fields.whole("a", 2, 5).unwrap_err().code, "invalid_value");
        assert_eq!(fields.biases("f", 10).unwrap_err().code, "invalid_value");
        assert_eq!(fields.biases("h", 10).unwrap(), BTreeMap::from([(1, 3.0)]));
        assert!(Fields::new(&Json::Null).is_err());
    }
}
