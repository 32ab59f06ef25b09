//! Running the tools as a shell does.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command as StdCommand;

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use serde_json::Value;

/// What would change the tools' defaults.
const ENVIRONMENT: [&str; 19] = [
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "WASTE_BUDGET",
    "WASTE_THREADS",
    "WASTE_KERNELS",
    "WASTE_LOOKAHEAD",
    "WASTE_IO_DEPTH",
    "NO_COLOR",
    "RUST_BACKTRACE",
    "RUST_LIB_BACKTRACE",
];

/// A tool of the workspace, by name, without the caller's settings in its environment.
///
/// # Panics
/// It has not been built. (Tests only.)
pub fn tool(name: &str) -> Command {
    Command::from_std(process(name))
}

/// The same for tests that feed, watch or stop the process while it runs.
///
/// # Panics
/// As there.
pub fn process(name: &str) -> StdCommand {
    // Under Wine the runner is a program of the host, which no Windows program can start; the tool itself it can.
    let command = if cfg!(windows) {
        Ok(StdCommand::new(assert_cmd::cargo::cargo_bin(name)))
    } else {
        StdCommand::cargo_bin(name)
    };
    let mut command =
        command.unwrap_or_else(|_| panic!("{name} is not built: cargo build --workspace --bins"));
    for key in ENVIRONMENT {
        command.env_remove(key);
    }
    command
}

/// Whether the tools run on an emulated CPU, where whole texts take too long.
pub fn emulated() -> bool {
    process("waste-run").get_program().to_string_lossy().contains("qemu")
}

/// The directory of the tools that were built.
///
/// # Panics
/// They have not been, or run under an emulator. (Tests only.)
pub fn bin_dir() -> std::path::PathBuf {
    let program = std::path::PathBuf::from(process("waste-run").get_program());
    program.parent().unwrap_or_else(|| panic!("{}", program.display())).to_owned()
}

/// What a tool did.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The exit code; `None` if a signal ended it.
    pub exit: Option<i32>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
}

/// Runs a tool with arguments.
pub fn run(name: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Ran {
    Ran::of(tool(name).args(args))
}

impl Ran {
    /// Runs a command to its end.
    ///
    /// # Panics
    /// It cannot be started, or writes what is not UTF-8. (Tests only.)
    #[track_caller]
    pub fn of(command: &mut Command) -> Ran {
        Ran::from_output(command.output().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Of a process that was awaited by hand.
    ///
    /// # Panics
    /// It wrote what is not UTF-8. (Tests only.)
    #[track_caller]
    pub fn from_output(output: std::process::Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).unwrap_or_else(|error| panic!("{error}"));
        Ran { exit: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// The same, if it ended well.
    ///
    /// # Panics
    /// It did not. (Tests only.)
    #[track_caller]
    pub fn done(self) -> Ran {
        self.exits(0)
    }

    /// The same, if it ended with this exit code.
    ///
    /// # Panics
    /// It did not, or there was a panic on the way. (Tests only.)
    #[track_caller]
    pub fn exits(self, exit: i32) -> Ran {
        assert_eq!(self.exit, Some(exit), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// The one JSON object on stdout, whose first key is `schema`.
    ///
    /// # Panics
    /// There is anything else. (Tests only.)
    #[track_caller]
    pub fn json(&self, schema: &str) -> Value {
        let value: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.stdout, self.stderr));
        assert!(self.stdout.starts_with(&format!("{{\"schema\":\"{schema}\"")), "{}", self.stdout);
        assert_eq!(self.stdout.matches('\n').count(), 1, "{}", self.stdout);
        value
    }

    /// The error object of a run with `--json` that ended with this exit and code. stderr says something too.
    ///
    /// # Panics
    /// It did not. (Tests only.)
    #[track_caller]
    pub fn error(&self, exit: i32, code: &str) -> Value {
        self.clone().exits(exit);
        let value: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.stdout, self.stderr));
        let error = &value["error"];
        assert_eq!(
            (error["code"].as_str(), error["exit"].as_i64()),
            (Some(code), Some(exit.into())),
            "{error}"
        );
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        assert!(!self.stderr.is_empty());
        error.clone()
    }
}

/// A path as an argument.
///
/// # Panics
/// It is not UTF-8. (Tests only.)
pub fn arg(path: &Path) -> &str {
    path.to_str().unwrap_or_else(|| panic!("{}", path.display()))
}
