//! The JSON of one stage is the input of the next: MODEL `-` reads the previous tool's object from stdin.

use super::failure::Form;
use super::{Exit, Failure};
use serde_json::{Map, Value};
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// The longest object read from a previous tool, in bytes.
const LIMIT: u64 = 1 << 20;

/// What a MODEL argument names.
#[derive(Clone, Debug, PartialEq)]
pub enum Model {
    /// A path given by hand; what lies there is not known yet.
    Path(PathBuf),
    /// What a previous tool made or looked at.
    Chained(Chained),
}

/// What a chained model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A converted container.
    Container,
    /// A downloaded checkpoint.
    Checkpoint,
    /// A bare `config.json`, or the name of a known model.
    Config,
}

impl Kind {
    /// The key a stage names it by, also its noun in messages.
    pub fn key(self) -> &'static str {
        match self {
            Kind::Container => "container",
            Kind::Checkpoint => "checkpoint",
            Kind::Config => "config",
        }
    }
}

/// The object of a previous tool, checked to be a success that names a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Chained {
    /// What it names.
    pub kind: Kind,
    /// Where that is.
    pub path: PathBuf,
    object: Map<String, Value>,
}

/// Resolve a MODEL argument; `-` reads the previous tool's object from standard input.
///
/// # Errors
/// Standard input is a terminal (exit 2), is no single JSON object below 1 MiB or names no model (exit 3); the
/// previous tool failed (its object passes through with its exit code) or answered no (exit 1).
pub fn resolve_model(argument: &Path) -> Result<Model, Failure> {
    if argument != Path::new("-") {
        return Ok(Model::Path(argument.to_owned()));
    }
    if io::stdin().is_terminal() {
        return Err(Failure::usage(
            "MODEL `-` reads the JSON of a previous tool, but standard input is a terminal; \
             pipe a tool run with --json into this one, or write ./- for a path of that name",
        ));
    }
    Chained::read(io::stdin().lock(), "standard input").map(Model::Chained)
}

impl Model {
    /// Where the model is.
    pub fn path(&self) -> &Path {
        match self {
            Model::Path(path) => path,
            Model::Chained(chained) => &chained.path,
        }
    }

    /// What a previous tool said, if the model comes from one.
    pub fn chained(&self) -> Option<&Chained> {
        match self {
            Model::Path(_) => None,
            Model::Chained(chained) => Some(chained),
        }
    }

    /// The path, for a tool that takes one kind only. A path given by hand is taken as it is.
    ///
    /// # Errors
    /// A previous tool named another kind (exit 3).
    pub fn expect_kind(&self, wanted: Kind) -> Result<&Path, Failure> {
        match self.chained() {
            Some(chained) if chained.kind != wanted => Err(Failure::data(
                "wrong_kind",
                format!(
                    "a {} is needed here, but the previous tool ({}) names a {}: {}",
                    wanted.key(),
                    chained.schema(),
                    chained.kind.key(),
                    chained.path.display()
                ),
            )),
            _ => Ok(self.path()),
        }
    }
}

impl Chained {
    /// Reads the object in a file, such as the plan of `--plan`.
    ///
    /// # Errors
    /// The file cannot be read (exit 3); else as for [`resolve_model`].
    pub fn open(path: &Path) -> Result<Chained, Failure> {
        let name = path.display().to_string();
        let file = std::fs::File::open(path).map_err(|error| {
            Failure::data("unreadable_file", format!("cannot read the plan {name}: {error}"))
        })?;
        Chained::read(file, &name)
    }

    /// Read one object from `reader`, called `source` in messages (a pipe, or the file of `--plan`).
    ///
    /// # Errors
    /// As for [`resolve_model`].
    pub fn read(reader: impl Read, source: &str) -> Result<Chained, Failure> {
        let mut text = Vec::new();
        reader.take(LIMIT + 1).read_to_end(&mut text).map_err(|error| {
            Failure::data("chain", format!("cannot read the previous tool's JSON from {source}: {error}"))
        })?;
        if text.len() as u64 > LIMIT {
            return Err(Failure::data(
                "chain",
                format!("{source} holds more than 1 MiB; expected the one JSON object of a previous tool"),
            ));
        }
        Chained::parse(&text, source)
    }

    fn parse(text: &[u8], source: &str) -> Result<Chained, Failure> {
        let bad = |problem: String| {
            Err(Failure::data("chain", format!("{source}: {problem}; run the previous tool with --json")))
        };
        if text.trim_ascii().is_empty() {
            return bad("empty, expected the JSON object of a previous tool".into());
        }
        let object = match serde_json::from_slice(text) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return bad("expected a JSON object, found another value".into()),
            Err(error) => return bad(format!("expected exactly one JSON object: {error}")),
        };
        if let Some(error) = object.get("error").filter(|error| !is_quantisation_error(error)) {
            return Err(passed_through(&object, error, text));
        }
        let schema = schema_of(&object);
        for answer in ["ok", "fits", "disk_fits"] {
            let said = object.get(answer);
            // A plan for a disk that does not tell what is free.
            let unknown = answer == "disk_fits" && said == Some(&Value::Null);
            if said.is_some_and(|said| !said.is_boolean() && !unknown) {
                return bad(format!("`{answer}` ({schema}) should be true or false"));
            }
            if said == Some(&Value::Bool(false)) {
                let reason = object.get("verdict").and_then(Value::as_str);
                return Err(Failure::new(
                    Exit::No,
                    "previous_said_no",
                    format!(
                        "stopped: the previous tool ({schema}) answered {answer}: false{}",
                        reason.map(|reason| format!(": {reason}")).unwrap_or_default()
                    ),
                )
                .with("previous", schema));
            }
        }
        for kind in [Kind::Container, Kind::Checkpoint, Kind::Config] {
            match object.get(kind.key()) {
                None | Some(Value::Null) => (),
                Some(Value::String(path)) if !path.is_empty() => {
                    return Ok(Chained { kind, path: path.into(), object });
                }
                Some(_) => return bad(format!("`{}` should be a path", kind.key())),
            }
        }
        bad(format!("the object ({schema}) names no container, checkpoint or config"))
    }

    /// The whole object.
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// The schema of the object, such as `waste-plan/1`.
    pub fn schema(&self) -> &str {
        schema_of(&self.object)
    }

    /// The budget of a plan, in bytes.
    ///
    /// # Errors
    /// The key is there but is no whole number of bytes (exit 3). So for the other getters.
    pub fn budget_bytes(&self) -> Result<Option<u64>, Failure> {
        self.get("budget_bytes", "a whole number of bytes", Value::as_u64)
    }

    /// The context length of a plan, in tokens.
    ///
    /// # Errors
    /// See [`budget_bytes`](Self::budget_bytes).
    pub fn ctx(&self) -> Result<Option<u64>, Failure> {
        self.get("ctx", "a whole number of tokens", Value::as_u64)
    }

    /// The KV type of a plan.
    ///
    /// # Errors
    /// See [`budget_bytes`](Self::budget_bytes).
    pub fn kv(&self) -> Result<Option<&str>, Failure> {
        self.get("kv", "a string", Value::as_str)
    }

    /// The sequences together of a plan.
    ///
    /// # Errors
    /// See [`budget_bytes`](Self::budget_bytes).
    pub fn parallel(&self) -> Result<Option<u64>, Failure> {
        self.get("parallel", "a whole number", Value::as_u64)
    }

    /// Whether a plan counts vision.
    ///
    /// # Errors
    /// See [`budget_bytes`](Self::budget_bytes).
    pub fn vision(&self) -> Result<Option<bool>, Failure> {
        self.get("vision", "true or false", Value::as_bool)
    }

    fn get<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| {
                Failure::data(
                    "chain",
                    format!("`{key}` of the previous tool ({}) should be {wanted}", self.schema()),
                )
            }),
        }
    }
}

fn schema_of(object: &Map<String, Value>) -> &str {
    object.get("schema").and_then(Value::as_str).unwrap_or("without a schema")
}

/// Whether `error` is what a successful conversion says: its quantisation error, or null for a model without experts.
fn is_quantisation_error(error: &Value) -> bool {
    const MATRICES: [&str; 3] = ["gate", "up", "down"];
    match error {
        Value::Null => true,
        Value::Object(error) => {
            error.len() == MATRICES.len()
                && MATRICES.iter().all(|matrix| error.get(*matrix).is_some_and(Value::is_number))
        }
        _ => false,
    }
}

/// The failure of an earlier stage, as it came: an object of ours, or whatever another program calls an error.
fn passed_through(object: &Map<String, Value>, error: &Value, text: &[u8]) -> Failure {
    let exit = match error.get("exit") {
        None => Exit::No,
        // An error never ends in success, whatever it claims.
        Some(exit) => {
            exit.as_u64().and_then(Exit::from_code).filter(|exit| *exit != Exit::Done).unwrap_or(Exit::Data)
        }
    };
    let string = |key: &str, default: &str| {
        error.get(key).and_then(Value::as_str).or(error.as_str()).unwrap_or(default).to_owned()
    };
    let tool = object.get("schema").and_then(Value::as_str).and_then(|schema| schema.split('/').next());
    let mut failure = Failure::new(
        exit,
        error.get("code").and_then(Value::as_str).unwrap_or("unknown"),
        string("message", "failed without a message"),
    );
    failure.form = Form::Earlier {
        tool: tool.unwrap_or("previous tool").to_owned(),
        object: String::from_utf8_lossy(text.trim_ascii()).into_owned(),
    };
    failure
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Chained, Failure> {
        Chained::read(text.as_bytes(), "stdin")
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        let model = resolve_model(Path::new("./-")).unwrap();
        assert_eq!(model, Model::Path("./-".into()));
        assert_eq!(model.expect_kind(Kind::Container).unwrap(), Path::new("./-"));
    }

    #[test]
    fn the_container_comes_before_the_checkpoint_and_the_config() {
        for (text, kind, path) in [
            (r#"{"checkpoint":"c","container":"k"}"#, Kind::Container, "k"),
            (r#"{"config":"f","checkpoint":"c","container":null}"#, Kind::Checkpoint, "c"),
            (r#" {"config":"kimi-k3"} "#, Kind::Config, "kimi-k3"),
        ] {
            let chained = read(text).unwrap();
            assert_eq!((chained.kind, chained.path.as_path()), (kind, Path::new(path)));
        }
        let model = Model::Chained(read(r#"{"schema":"waste-download/1","checkpoint":"c"}"#).unwrap());
        assert!(model.expect_kind(Kind::Checkpoint).is_ok());
        let failure = model.expect_kind(Kind::Container).unwrap_err();
        assert!(failure.message.contains("waste-download/1"), "{failure}");
    }

    #[test]
    fn a_plan_gives_budget_ctx_kv_and_vision() {
        let plan = read(
            r#"{"schema":"waste-plan/1","container":"k","ctx":4096,"kv":"f16","vision":false,"budget_bytes":49649821941,"fits":true}"#,
        )
        .unwrap();
        assert_eq!(plan.budget_bytes(), Ok(Some(49_649_821_941)));
        assert_eq!(
            (plan.ctx(), plan.kv(), plan.vision()),
            (Ok(Some(4096)), Ok(Some("f16")), Ok(Some(false)))
        );
        assert_eq!(plan.schema(), "waste-plan/1");
        assert_eq!(read(r#"{"container":"k"}"#).unwrap().budget_bytes(), Ok(None));
        for bad in ["-1", "1.5", "\"46G\"", "1e30"] {
            let plan = read(&format!(r#"{{"container":"k","budget_bytes":{bad}}}"#)).unwrap();
            assert_eq!(plan.budget_bytes().unwrap_err().exit, Exit::Data, "{bad}");
        }
    }

    #[test]
    fn what_is_no_single_object_is_refused() {
        let long = format!(r#"{{"container":"{}"}}"#, "x".repeat(LIMIT as usize));
        for text in [
            "",
            "  \n",
            "null",
            "[]",
            "7",
            "{}",
            "{",
            r#"{"container":"k"}{"container":"k"}"#,
            r#"{"container":7}"#,
            r#"{"container":""}"#,
            "hello",
            &long,
            &"[".repeat(100_000),
        ] {
            let failure = read(text).unwrap_err();
            assert_eq!((failure.exit, failure.code.as_str()), (Exit::Data, "chain"));
            assert!(failure.message.contains("stdin"), "{failure}");
        }
    }

    #[test]
    fn a_no_stops_and_says_who_said_it() {
        let failure =
            read(r#"{"schema":"waste-plan/1","container":"k","fits":false,"verdict":"needs 64 GiB"}"#)
                .unwrap_err();
        assert_eq!(failure.exit, Exit::No);
        assert!(
            failure.message.contains("waste-plan/1") && failure.message.contains("needs 64 GiB"),
            "{failure}"
        );
        assert_eq!(read(r#"{"container":"k","ok":false}"#).unwrap_err().exit, Exit::No);
    }

    #[test]
    fn an_error_keeps_its_exit_code_but_never_becomes_success() {
        for (exit, expected) in [("4", Exit::Space), ("0", Exit::Data), ("9", Exit::Data), ("-1", Exit::Data)]
        {
            let text =
                format!(r#"{{"schema":"waste-plan/1","error":{{"code":"c","exit":{exit},"message":"m"}}}}"#);
            let failure = read(&text).unwrap_err();
            assert_eq!((failure.exit, failure.code.as_str(), failure.message.as_str()), (expected, "c", "m"));
            assert_eq!(failure.form, Form::Earlier { tool: "waste-plan".into(), object: text });
        }
    }

    #[test]
    fn any_other_error_is_a_failure_too() {
        for (error, message) in [
            (r#""no such model""#, "no such model"),
            (r#"{"message":"m"}"#, "m"),
            (r#"{"gate":0.2,"up":0.2}"#, "failed without a message"),
            (r#"{"gate":0.2,"up":0.2,"down":"x"}"#, "failed without a message"),
            ("true", "failed without a message"),
            ("[]", "failed without a message"),
        ] {
            let failure = read(&format!(r#"{{"container":"k","error":{error}}}"#)).unwrap_err();
            assert_eq!((failure.exit, failure.message.as_str()), (Exit::No, message), "{error}");
        }
        let both = r#"{"container":"k","error":{"gate":0.2,"up":0.2,"down":0.2,"exit":4}}"#;
        assert_eq!(read(both).unwrap_err().exit, Exit::Space);
    }

    #[test]
    fn answers_are_true_or_false_and_each_no_stops() {
        for answer in ["ok", "fits", "disk_fits"] {
            let with = |value: &str| read(&format!(r#"{{"container":"k","{answer}":{value}}}"#));
            assert!(with("true").is_ok());
            assert_eq!(with("false").unwrap_err().exit, Exit::No);
            for value in [r#""false""#, "0", "1", "{}", "[]"] {
                let failure = with(value).unwrap_err();
                assert_eq!((failure.exit, failure.code.as_str()), (Exit::Data, "chain"), "{answer} {value}");
            }
            assert_eq!(with("null").is_ok(), answer == "disk_fits");
        }
    }

    /// `error` of waste-convert is a success's key: the quantisation error.
    #[test]
    fn the_quantisation_error_of_a_conversion_is_no_failure() {
        let done = read(r#"{"container":"k","error":{"gate":0.2,"up":0.2,"down":0.2}}"#).unwrap();
        assert_eq!(done.kind, Kind::Container);
        assert!(read(r#"{"container":"k","error":null}"#).is_ok());
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,64}|\\{\"(container|error|ok)\":[a-z0-9{}\":]{0,24}\\}") {
            let _ = read(&text);
        }
    }
}
