//! Ctrl-C and SIGTERM: the first asks the tool to stop at its next safe point, a second one stops it at once.

use super::{Exit, Failure};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether a signal asked for the end. Cheap to clone and to ask.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
    /// SIGTERM came, which nobody answers with another question.
    terminated: Arc<AtomicBool>,
}

impl Interrupt {
    /// The process's own: from the first call on, SIGINT and SIGTERM set it, and a second one ends the process
    /// with 130.
    ///
    /// # Errors
    /// The system refuses to install the handler (exit 70).
    pub fn install() -> Result<Interrupt, Failure> {
        static INSTALLED: OnceLock<Interrupt> = OnceLock::new();
        if let Some(interrupt) = INSTALLED.get() {
            return Ok(interrupt.clone());
        }
        let interrupt = Interrupt::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the shutdown looks at the flag before the second handler sets it.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                Exit::Interrupted.code().into(),
                interrupt.flag.clone(),
            )
            .and_then(|_| signal_hook::flag::register(signal, interrupt.flag.clone()))
            .map_err(|error| {
                Failure::internal(format!("cannot install a handler for signal {signal}: {error}"))
            })?;
        }
        signal_hook::flag::register(SIGTERM, interrupt.terminated.clone())
            .map_err(|error| Failure::internal(format!("cannot install a handler for SIGTERM: {error}")))?;
        Ok(INSTALLED.get_or_init(|| interrupt).clone())
    }

    /// One that no signal sets, for tests and embedders; [`request`](Self::request) does.
    pub fn new() -> Interrupt {
        Interrupt::default()
    }

    /// The flag itself, for code that knows no command line.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Ask for the end, as the first signal does.
    pub fn request(&self) {
        self.flag.store(true, Ordering::SeqCst);
    }

    /// True once the end has been asked for.
    pub fn requested(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Forgets a Ctrl-C that has stopped something smaller than the tool; the next one is a first one again. False if
    /// it was a SIGTERM, which means the whole tool.
    pub fn forgive(&self) -> bool {
        let forgiven = !self.terminated.load(Ordering::SeqCst);
        if forgiven {
            self.flag.store(false, Ordering::SeqCst);
        }
        forgiven
    }

    /// For the safe points of a loop.
    ///
    /// # Errors
    /// [`Failure::interrupted`] once the end has been asked for.
    pub fn check(&self) -> Result<(), Failure> {
        if self.requested() { Err(Failure::interrupted()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_reaches_every_clone() {
        let interrupt = Interrupt::new();
        let other = interrupt.clone();
        assert_eq!(other.check(), Ok(()));
        interrupt.request();
        assert_eq!(other.check().unwrap_err().exit, Exit::Interrupted);
        assert!(other.forgive() && interrupt.check().is_ok());
    }

    /// Runs this test binary again as a child, which sends itself one signal (or two).
    #[cfg(unix)]
    #[test]
    fn the_first_signal_sets_the_flag_and_the_second_ends_the_process() {
        const KEY: &str = "WASTE_TEST_SIGNALS";
        if let Ok(count) = std::env::var(KEY) {
            // Another thread may be the one to get the signal, a moment later.
            let wait = |done: &dyn Fn() -> bool| {
                (0..1000).any(|_| {
                    done() || {
                        std::thread::sleep(std::time::Duration::from_millis(10));
                        false
                    }
                })
            };
            let send = |signal| rustix::process::kill_process(rustix::process::getpid(), signal).unwrap();
            let interrupt = Interrupt::install().unwrap();
            assert!(!interrupt.requested());
            send(rustix::process::Signal::TERM);
            assert!(wait(&|| interrupt.requested()));
            // Of a SIGTERM.
            assert!(!interrupt.forgive() && interrupt.requested());
            if count == "2" {
                send(rustix::process::Signal::INT);
                wait(&|| false);
            }
            std::process::exit(7);
        }
        let child = |count: &str| {
            let name = "cli::signals::tests::the_first_signal_sets_the_flag_and_the_second_ends_the_process";
            crate::testing::this_program()
                .args(["--exact", name, "--test-threads=1"])
                .env(KEY, count)
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap()
                .code()
        };
        assert_eq!(child("1"), Some(7));
        assert_eq!(child("2"), Some(130));
    }
}
