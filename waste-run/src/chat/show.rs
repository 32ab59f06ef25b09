//! An answer on its way to the reader.

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
    /// For a person at a terminal, or not.
    pub fn new(terminal: bool, output: &'a Output) -> Show<'a> {
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

#[cfg(test)]
mod tests {
    use waste_common::cli::{Captured, Exit, run_captured};
    use waste_engine::Finish;
    use waste_engine::chat::Answer;

    use super::*;
    use crate::TOOL;
    use crate::args::Args;

    /// Shows an answer of `paces.len()` tokens, one letter each, that comes at these times; then whatever `then` does.
    fn shown(seconds: &[f64], then: impl FnOnce(&mut Show<'_>) -> Result<(), Failure>) -> Captured {
        run_captured(TOOL, ["model"], |_: Args, output| {
            let mut show = Show::new(false, output);
            for (i, at) in seconds.iter().enumerate() {
                let deltas = vec![Delta::Reasoning("hm".to_owned()), Delta::Content(format!("{i}"))];
                show.step(Step { deltas, tokens: i + 1, seconds: *at })?;
            }
            let last = seconds.last().copied().unwrap_or(0.0);
            show.finish(&Answered {
                answer: Answer::default(),
                finish: Finish::Stop,
                api_reason: "stop",
                prompt_tokens: 1,
                reused_tokens: 0,
                tokens: seconds.len(),
                reasoning_tokens: 0,
                seed: 0,
                prefill_seconds: 0.0,
                decode_seconds: last,
            })?;
            then(&mut show)?;
            Ok(Exit::Done)
        })
    }

    #[test]
    fn a_slow_answer_is_announced_before_it_is_shown() {
        let captured = shown(&[0.0, 2.0, 4.0, 6.0], |show| {
            assert_eq!(show.slow(), Some(200.0));
            Ok(())
        });
        assert_eq!(
            (captured.stdout.as_str(), captured.stderr.as_str()),
            ("0123\n", "about 200 s per 100 tokens\n")
        );
        // Nothing before it is known; an answer of a token or two is shown at its end.
        assert_eq!(shown(&[0.0, 9.0], |_| Ok(())).stderr, "");
        let short = shown(&[0.0, 9.0], |show| {
            assert_eq!(show.slow(), Some(900.0));
            Ok(())
        });
        assert_eq!((short.exit, short.stdout.as_str()), (Exit::Done, "01\n"));
        let fast = shown(&[0.0, 0.1, 0.2], |show| {
            assert_eq!(show.slow(), None);
            Ok(())
        });
        assert_eq!((fast.stdout.as_str(), fast.stderr.as_str()), ("012\n", ""));
    }
}
