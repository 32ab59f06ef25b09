//! The two streams of a tool: the result on stdout, everything else on stderr.

use super::failure::Form;
use super::{CommonArgs, Exit, Failure};
use indicatif::{MultiProgress, ProgressDrawTarget};
use serde::Serialize;
use std::fmt::{Arguments, Display};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a tool's words go.
pub(super) struct Streams {
    pub stdout: Box<dyn Write + Send>,
    pub stderr: Box<dyn Write + Send>,
    /// Stderr is a terminal: bars may be drawn.
    pub terminal: bool,
}

impl Streams {
    pub fn standard() -> Streams {
        Streams {
            stdout: Box::new(io::stdout()),
            stderr: Box::new(io::stderr()),
            terminal: io::stderr().is_terminal(),
        }
    }
}

/// The output of a tool. Cheap to clone; may be used from several threads.
#[derive(Clone)]
pub struct Output {
    inner: Arc<Inner>,
}

struct Inner {
    tool: &'static str,
    flags: CommonArgs,
    colour: bool,
    terminal: bool,
    stdout: Mutex<Box<dyn Write + Send>>,
    stderr: Mutex<Box<dyn Write + Send>>,
    state: Mutex<State>,
    bars: MultiProgress,
}

struct State {
    schema: &'static str,
    /// The one JSON object has been written.
    answered: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Output {
    pub(super) fn new(
        tool: &'static str,
        schema: &'static str,
        flags: CommonArgs,
        streams: Streams,
    ) -> Output {
        let wanted = |key| std::env::var_os(key).is_none_or(|value| value.is_empty());
        // Old Windows consoles print escapes as they are; the new one announces itself.
        let able = if cfg!(windows) {
            std::env::var_os("WT_SESSION").is_some()
        } else {
            std::env::var_os("TERM").is_none_or(|term| term != "dumb")
        };
        let target = if streams.terminal && !flags.quiet {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Output {
            inner: Arc::new(Inner {
                tool,
                flags,
                colour: streams.terminal && wanted("NO_COLOR") && able,
                terminal: streams.terminal,
                stdout: Mutex::new(streams.stdout),
                stderr: Mutex::new(streams.stderr),
                state: Mutex::new(State { schema, answered: false }),
                bars: MultiProgress::with_draw_target(target),
            }),
        }
    }

    /// True with `--json`.
    pub fn json(&self) -> bool {
        self.inner.flags.json
    }

    /// True with `-q`.
    pub fn quiet(&self) -> bool {
        self.inner.flags.quiet
    }

    /// True with `-v`.
    pub fn verbose(&self) -> bool {
        self.inner.flags.verbose
    }

    /// True if stderr is a terminal, where progress may be drawn.
    pub fn terminal(&self) -> bool {
        self.inner.terminal
    }

    /// The name of the tool.
    pub fn tool(&self) -> &'static str {
        self.inner.tool
    }

    pub(super) fn bars(&self) -> &MultiProgress {
        &self.inner.bars
    }

    /// Name the schema of the subcommand that runs, such as `waste-run-eval/1`; errors carry it too.
    pub fn set_schema(&self, schema: &'static str) {
        lock(&self.inner.state).schema = schema;
    }

    /// The schema in force.
    pub fn schema(&self) -> &'static str {
        lock(&self.inner.state).schema
    }

    /// Write the result as one JSON object in one line, `schema` first. `body` is a struct or a map without a key
    /// `schema`.
    ///
    /// # Errors
    /// The body is no object, a result has been written already (both bugs, exit 70), or stdout fails.
    pub fn result(&self, body: &impl Serialize) -> Result<(), Failure> {
        let mut state = lock(&self.inner.state);
        if state.answered {
            return Err(Failure::internal("a second result was about to be written"));
        }
        let line = envelope(state.schema, body)?;
        state.answered = true;
        drop(state);
        self.text().write_all(line.as_bytes())
    }

    /// Write one event of a stream of JSON lines, `schema` first, and flush it.
    ///
    /// # Errors
    /// As for [`result`](Self::result).
    pub fn event(&self, body: &impl Serialize) -> Result<(), Failure> {
        let line = envelope(self.schema(), body)?;
        self.text().write_all(line.as_bytes())?;
        self.text().flush()
    }

    /// Standard output, for `write!` and `writeln!`.
    pub fn text(&self) -> Text<'_> {
        Text { inner: &self.inner }
    }

    /// A line on stderr; not with `-q`.
    pub fn note(&self, message: impl Display) {
        if !self.quiet() {
            self.say(format_args!("{message}"));
        }
    }

    /// A line on stderr with `-v` only.
    pub fn detail(&self, message: impl Display) {
        if self.verbose() {
            self.say(format_args!("{message}"));
        }
    }

    /// A warning on stderr; not with `-q`.
    pub fn warn(&self, message: impl Display) {
        if !self.quiet() {
            let word = self.paint("33", "warning:");
            self.say(format_args!("{}: {word} {message}", self.inner.tool));
        }
    }

    /// Text in a colour (an SGR code), where stderr takes colours.
    pub fn paint(&self, colour: &str, text: &str) -> String {
        if self.inner.colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A line on stderr, above any bars. A stderr that fails is no reason to stop.
    pub(super) fn say(&self, message: Arguments<'_>) {
        self.inner.bars.suspend(|| {
            let mut stderr = lock(&self.inner.stderr);
            let _ = stderr.write_fmt(format_args!("{message}\n"));
            let _ = stderr.flush();
        });
    }

    /// Show why the tool ends, and say with what.
    pub(super) fn fail(&self, failure: &Failure) -> Exit {
        let (tool, object) = match &failure.form {
            Form::Silent => return Exit::Done,
            Form::Earlier { tool, object } => (tool.as_str(), format!("{object}\n")),
            Form::Own => (self.inner.tool, format!("{}\n", failure.object(self.schema()))),
        };
        let message = printable(&failure.message);
        self.say(format_args!("{}: {message}", self.paint("31", tool)));
        let mut state = lock(&self.inner.state);
        if self.json() && !state.answered {
            state.answered = true;
            // The failure at hand is the one to report, whatever becomes of its object.
            let _ = self.text().write_all(object.as_bytes());
        }
        failure.exit
    }

    /// Flush stdout at the end.
    pub(super) fn finish(&self, exit: Exit) -> Exit {
        match self.text().flush() {
            Err(failure) if exit == Exit::Done => self.fail(&failure),
            _ => exit,
        }
    }
}

/// One line of JSON: the schema, then the keys of `body`.
fn envelope(schema: &str, body: &impl Serialize) -> Result<String, Failure> {
    /// Flattening keeps the numbers of `body` as they are; a detour through `Value` would widen its f32s.
    #[derive(Serialize)]
    struct Envelope<'a, T> {
        schema: &'a str,
        #[serde(flatten)]
        body: &'a T,
    }
    let mut line = serde_json::to_string(&Envelope { schema, body }).map_err(|error| {
        Failure::internal(format!("cannot write the result of {schema} as JSON: {error}"))
    })?;
    line.push('\n');
    Ok(line)
}

/// Text from outside without the control characters that would steer a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// Standard output. A reader that went away ends the tool quietly: the failure returned then makes [`main`]
/// say nothing and succeed.
///
/// [`main`]: fn@super::main
pub struct Text<'a> {
    inner: &'a Inner,
}

impl Text<'_> {
    /// What `write!` calls.
    ///
    /// # Errors
    /// Stdout is closed (a quiet end) or fails (exit 4).
    pub fn write_fmt(&mut self, arguments: Arguments<'_>) -> Result<(), Failure> {
        lock(&self.inner.stdout).write_fmt(arguments).map_err(stdout_failure)
    }

    /// Write bytes as they are.
    ///
    /// # Errors
    /// As for [`write_fmt`](Self::write_fmt).
    pub fn write_all(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        lock(&self.inner.stdout).write_all(bytes).map_err(stdout_failure)
    }

    /// Hand what was written to the reader.
    ///
    /// # Errors
    /// As for [`write_fmt`](Self::write_fmt).
    pub fn flush(&mut self) -> Result<(), Failure> {
        lock(&self.inner.stdout).flush().map_err(stdout_failure)
    }
}

fn stdout_failure(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Failure::closed();
    }
    Failure::new(Exit::Space, "stdout", format!("cannot write the result to standard output: {error}"))
}
