//! An answer on its way to the reader.

use std::io::IsTerminal;

use waste_common::cli::{Failure, Output, printable};
use waste_engine::chat::Delta;

use super::conversation::{Answered, Step};

/// Seconds for 100 tokens from which on one is told before an answer.
const SLOW_SECONDS: f64 = 20.0;
/// Decode steps from which the pace of a first answer is known.
const STEPS: usize = 2;

/// What the reader sees.
pub struct Show<'a> {
    output: &'a Output,
    /// The reader is a person at a terminal.
    terminal: bool,
    thinking: bool,
    /// Tokens a second, of the last answer or of the beginning of this one.
    pace: Option<f64>,
    /// What waits until the pace is known.
    held: Vec<Delta>,
    at: At,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    Thinking,
    Answer,
}

impl<'a> Show<'a> {
    /// For a terminal, a pipe, or JSON.
    pub fn new(output: &'a Output) -> Show<'a> {
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !output.json();
        Show { output, terminal, thinking: true, pace: None, held: Vec::new(), at: At::Start }
    }

    /// Shows or hides thinking; says which.
    pub fn toggle_thinking(&mut self) -> bool {
        self.thinking = !self.thinking;
        self.thinking
    }

    /// Seconds for 100 tokens, if that is long.
    pub fn slow(&self) -> Option<f64> {
        self.pace.map(|pace| 100.0 / pace).filter(|seconds| *seconds >= SLOW_SECONDS)
    }

    /// Shows what a token added. The first answer waits for its first steps, so that its time is told before it.
    pub fn step(&mut self, step: Step) -> Result<(), Failure> {
        self.held.extend(step.deltas);
        if self.pace.is_none() {
            let steps = step.tokens.saturating_sub(1);
            if steps < STEPS || step.seconds <= 0.0 {
                return Ok(());
            }
            self.pace = Some(steps as f64 / step.seconds);
            if let Some(seconds) = self.slow() {
                self.output.note(format_args!("about {seconds:.0} s per 100 tokens"));
            }
        }
        self.flush()
    }

    /// Ends an answer.
    pub fn finish(&mut self, answered: &Answered) -> Result<(), Failure> {
        self.flush()?;
        self.pace = answered.pace().or(self.pace);
        if !self.output.json() {
            self.leave_thinking()?;
            self.write("\n")?;
        }
        self.at = At::Start;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        for delta in std::mem::take(&mut self.held) {
            match delta {
                _ if self.output.json() => (),
                Delta::Reasoning(text) if self.terminal => self.reasoning(&text)?,
                Delta::Content(text) => {
                    self.leave_thinking()?;
                    self.at = At::Answer;
                    let text = if self.terminal { printable(&text) } else { text };
                    self.write(&text)?;
                }
                // Calls are told of in the end.
                Delta::Reasoning(_) | Delta::Call { .. } | Delta::Arguments { .. } => (),
            }
        }
        Ok(())
    }

    fn reasoning(&mut self, text: &str) -> Result<(), Failure> {
        if self.thinking {
            let text = self.output.paint("2", &printable(text));
            self.write(&text)?;
        } else if self.at == At::Start {
            let text = self.output.paint("2", "(thinking)");
            self.write(&text)?;
        }
        self.at = At::Thinking;
        Ok(())
    }

    fn leave_thinking(&mut self) -> Result<(), Failure> {
        if self.at == At::Thinking {
            self.at = At::Answer;
            self.write("\n\n")?;
        }
        Ok(())
    }

    fn write(&self, text: &str) -> Result<(), Failure> {
        let mut stdout = self.output.text();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }
}
