//! A failure, rendered: what the edge of a tool prints and ends with.

use super::{Coded, Exit};
use serde_json::{Map, Value};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Why a tool ends without its result. Made from any [`Coded`] error by `?`, or by one of the constructors.
/// One pointer wide, so that results stay small.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure(Box<Details>);

/// What a [`Failure`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct Details {
    /// The exit code.
    pub exit: Exit,
    /// The stable name for scripts, such as `budget_below_floor`.
    pub code: String,
    /// What was being done, what was expected and found, what to do next.
    pub message: String,
    /// Further keys of the JSON error object.
    pub fields: Map<String, Value>,
    pub(super) form: Form,
}

impl Deref for Failure {
    type Target = Details;

    fn deref(&self) -> &Details {
        &self.0
    }
}

impl DerefMut for Failure {
    fn deref_mut(&mut self) -> &mut Details {
        &mut self.0
    }
}

/// How a failure is shown.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Form {
    /// The message on stderr, the error object on stdout.
    Own,
    /// An earlier stage's: its name for stderr, its object as it came for stdout.
    Earlier { tool: String, object: String },
    /// Nothing: nobody reads standard output any more.
    Silent,
}

impl Failure {
    /// A failure with this exit, stable code and message.
    pub fn new(exit: Exit, code: impl Into<String>, message: impl Into<String>) -> Failure {
        Failure(Box::new(Details {
            exit,
            code: code.into(),
            message: message.into(),
            fields: Map::new(),
            form: Form::Own,
        }))
    }

    /// The command line is wrong (exit 2, `usage`).
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, "usage", message)
    }

    /// Input data is bad (exit 3).
    pub fn data(code: impl Into<String>, message: impl Into<String>) -> Failure {
        Failure::new(Exit::Data, code, message)
    }

    /// A signal asked the tool to stop (exit 130, `interrupted`).
    pub fn interrupted() -> Failure {
        Failure::new(Exit::Interrupted, "interrupted", "interrupted")
    }

    /// Something that cannot happen did (exit 70, `internal`).
    pub fn internal(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Internal, "internal", message)
    }

    /// The reader of standard output has gone: end quietly, with success.
    pub(super) fn closed() -> Failure {
        let mut failure = Failure::new(Exit::Done, "closed", "standard output is closed");
        failure.form = Form::Silent;
        failure
    }

    /// The same with one more key in the JSON error object.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Failure {
        self.fields.insert(key.into(), value.into());
        self
    }

    /// The object of `--json`; the four keys every error has come first and cannot be replaced by fields.
    pub(super) fn object(&self, schema: &str) -> Value {
        let mut error = Map::new();
        error.insert("code".into(), self.code.clone().into());
        error.insert("exit".into(), self.exit.code().into());
        error.insert("message".into(), self.message.clone().into());
        for (key, value) in &self.fields {
            error.entry(key.as_str()).or_insert_with(|| value.clone());
        }
        let mut object = Map::new();
        object.insert("schema".into(), schema.into());
        object.insert("error".into(), error.into());
        object.into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<E: Coded> From<E> for Failure {
    fn from(error: E) -> Failure {
        let mut failure = Failure::new(error.exit(), error.code(), chain_text(&error));
        failure.fields = error.fields();
        failure
    }
}

/// The error and its causes in one line; a cause whose words the text already has is not repeated.
fn chain_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    enum Fault {
        #[error("cannot read {file}")]
        Read { file: &'static str, source: io::Error },
        #[error("cannot read {file}: {source}")]
        Repeats { file: &'static str, source: io::Error },
    }

    impl Coded for Fault {
        fn exit(&self) -> Exit {
            Exit::Data
        }
        fn code(&self) -> &'static str {
            "unreadable"
        }
        fn fields(&self) -> Map<String, Value> {
            let (Fault::Read { file, .. } | Fault::Repeats { file, .. }) = self;
            Map::from_iter([("file".to_owned(), (*file).into()), ("exit".to_owned(), 0.into())])
        }
    }

    fn convert(fault: Fault) -> Failure {
        (|| -> Result<(), Failure> { Err(fault)? })().unwrap_err()
    }

    #[test]
    fn a_cause_is_appended_once() {
        let gone = || io::Error::other("disk gone");
        for fault in [Fault::Read { file: "a", source: gone() }, Fault::Repeats { file: "a", source: gone() }]
        {
            assert_eq!(convert(fault).message, "cannot read a: disk gone");
        }
    }

    #[test]
    fn the_object_starts_with_the_schema_and_fields_cannot_hide_the_exit() {
        let failure = convert(Fault::Read { file: "a", source: io::Error::other("x") }).with("layer", 3);
        assert_eq!(
            failure.object("waste-x/1").to_string(),
            r#"{"schema":"waste-x/1","error":{"code":"unreadable","exit":3,"message":"cannot read a: x","file":"a","layer":3}}"#
        );
    }
}
