//! What the tests of this crate share.

use std::process::Command;

/// This test program, to be started again: through cargo's runner where the tests run on an emulated Arm.
pub fn this_program() -> Command {
    let program = std::env::current_exe().unwrap();
    match std::env::var("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER") {
        Ok(runner) if cfg!(all(target_arch = "aarch64", target_os = "linux")) => {
            let mut command = Command::new(runner);
            command.arg(program);
            command
        }
        _ => Command::new(program),
    }
}
