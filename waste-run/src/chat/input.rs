//! Messages from a terminal with line editing, or one a line from standard input.

use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};
use waste_common::cli::{Failure, Interrupt, Output};

use super::{WATCH, history};

/// Longest message of a line, in bytes.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Where messages come from.
pub enum Input {
    /// A person.
    Terminal(Box<Terminal>),
    /// A file or a pipe.
    Lines(Receiver<Result<String, Failure>>),
}

/// A terminal and its history.
pub struct Terminal {
    editor: Editor<(), FileHistory>,
    /// Where the history is kept, as long as that works.
    history: Option<PathBuf>,
}

impl Input {
    /// A terminal if both ends are one, else lines.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn open(history: bool, output: &Output) -> Result<Input, Failure> {
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !output.json();
        if !terminal {
            return Ok(Input::Lines(lines()));
        }
        let editor =
            Editor::with_config(Config::builder().auto_add_history(false).build()).map_err(failed)?;
        let mut terminal = Terminal { editor, history: history::path().filter(|_| history) };
        terminal.load(output);
        Ok(Input::Terminal(Box::new(terminal)))
    }

    /// Whether a person types.
    pub fn interactive(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line; `None` at the end.
    ///
    /// # Errors
    /// It cannot be read; a signal while nothing was being answered.
    pub fn next(&mut self, interrupt: &Interrupt, output: &Output) -> Result<Option<String>, Failure> {
        match self {
            Input::Terminal(terminal) => terminal.next(output),
            Input::Lines(lines) => loop {
                interrupt.check()?;
                match lines.recv_timeout(WATCH) {
                    Ok(line) => break line.map(Some),
                    Err(RecvTimeoutError::Timeout) => (),
                    Err(RecvTimeoutError::Disconnected) => break Ok(None),
                }
            },
        }
    }
}

impl Terminal {
    fn load(&mut self, output: &Output) {
        let Some(path) = &self.history else { return };
        let made = path.parent().map_or(Ok(()), create_private);
        let loaded = match self.editor.load_history(path) {
            Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            loaded => loaded,
        };
        if let Err(error) = made.map_err(ReadlineError::Io).and(loaded) {
            output.detail(format_args!("no history is kept: {}: {error}", path.display()));
            self.history = None;
        }
    }

    fn next(&mut self, output: &Output) -> Result<Option<String>, Failure> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.keep(&line, output);
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => output.note("/quit or Ctrl-D ends"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(failed(error)),
            }
        }
    }

    fn keep(&mut self, line: &str, output: &Output) {
        if line.trim().is_empty() || !history::keeps(line) {
            return;
        }
        // Kept at once: a conversation may end in any way.
        let added = self.editor.add_history_entry(line);
        if let (Ok(true), Some(path)) = (added, &self.history)
            && let Err(error) = self.editor.append_history(path)
        {
            output.detail(format_args!("no history is kept: {}: {error}", path.display()));
            self.history = None;
        }
    }
}

fn failed(error: ReadlineError) -> Failure {
    Failure::data("unreadable_terminal", format!("cannot read from the terminal: {error}"))
}

/// A directory for the user alone.
fn create_private(dir: &std::path::Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Lines of standard input, read by a thread, so that a signal is seen while none comes.
fn lines() -> Receiver<Result<String, Failure>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        let mut number = 0;
        loop {
            number += 1;
            let line = read_line(number).transpose();
            let over = !matches!(line, Some(Ok(_)));
            if let Some(line) = line
                && sender.send(line).is_err()
            {
                return;
            }
            if over {
                return;
            }
        }
    });
    receiver
}

fn read_line(number: usize) -> Result<Option<String>, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(LINE_BYTES_MAX + 1)
        .read_until(b'\n', &mut bytes)
        .map_err(|error| Failure::data("unreadable_file", format!("cannot read standard input: {error}")))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() as u64 > LINE_BYTES_MAX {
        let why = format!("line {number} of standard input holds more than {LINE_BYTES_MAX} bytes");
        return Err(Failure::data("text_too_large", why));
    }
    let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    match std::str::from_utf8(line) {
        Ok(line) => Ok(Some(line.to_owned())),
        Err(error) => {
            let at = error.valid_up_to();
            let why = format!(
                "line {number} of standard input is not valid UTF-8: byte {at} is the first wrong one"
            );
            Err(Failure::data("invalid_utf8", why))
        }
    }
}
