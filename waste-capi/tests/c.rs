//! Programs in C, against both libraries.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What Rust's static libraries need of the system.
const SYSTEM: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The C compiler, or why there is none to be used.
fn compiler() -> Result<String, &'static str> {
    if std::env::var_os("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER").is_some()
        && cfg!(target_arch = "aarch64")
    {
        return Err("an emulated CPU");
    }
    let name = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    match Command::new(&name).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(name),
        _ => Err("no C compiler"),
    }
}

/// Where cargo built the libraries: beside this test.
fn libraries() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let dir = here.parent().unwrap();
    assert!(dir.join("libwaste_capi.so").is_file(), "no library in {}", dir.display());
    dir.to_owned()
}

fn done(mut command: Command) -> Output {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {stderr}", output.status);
    output
}

/// Compiles an example; the warnings of C and of C++ are errors.
fn compile(cc: &str, example: &str, library: &[&str], to: &Path) {
    let mut command = Command::new(cc);
    command.args(["-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-O1", "-I"]);
    command.arg(root().join("include")).arg(root().join("examples").join(example));
    command.args(library).args(SYSTEM).arg("-o").arg(to);
    done(command);
}

#[test]
fn examples_run_with_either_library() {
    let cc = match compiler() {
        Ok(cc) => cc,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let built = libraries();
    let (shared, fixed) = (built.display().to_string(), built.join("libwaste_capi.a").display().to_string());
    let model = root().join("../tests/models/k3-tales");
    let mut texts = Vec::new();
    for (name, library) in [("shared", vec!["-L", &shared, "-lwaste_capi"]), ("static", vec![fixed.as_str()])]
    {
        let program = dir.path().join(format!("generate-{name}"));
        compile(&cc, "generate.c", &library, &program);
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", &shared).arg(&model).arg("Once upon a time");
        let output = done(command);
        texts.push(String::from_utf8(output.stdout).unwrap());
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("kernels ") && told.contains("experts: "), "{told}");
        assert_eq!(told.lines().count(), 4, "the library printed something: {told}");

        let program = dir.path().join(format!("session-{name}"));
        compile(&cc, "session.c", &library, &program);
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", &shared).arg(&model).arg(dir.path().join(format!("{name}.session")));
        let output = done(command);
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");

        let program = dir.path().join(format!("image-{name}"));
        compile(&cc, "image.c", &library, &program);
        let mut command = Command::new(&program);
        let golden = root().join("../tests/golden/tiny-k3");
        command.env("LD_LIBRARY_PATH", &shared).args([golden.join("ckpt"), golden.join("image.png")]);
        let output = done(command);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("loading: 100 %") && told.contains("75 x 53 pixels, 6 positions"), "{told}");
        assert!(output.stdout.starts_with(b"It shows") && output.stdout.len() > 12, "{:?}", output.stdout);
    }
    assert!(texts[0].starts_with("Once upon a time") && texts[0].len() > 60, "{texts:?}");
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn the_header_is_cpp_too() {
    let cc = match compiler() {
        Ok(cc) => cc,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("include.cc");
    std::fs::write(&source, "#include \"waste.h\"\n#include \"waste.h\"\n").unwrap();
    let mut command = Command::new(cc);
    command.args(["-x", "c++", "-fsyntax-only", "-Wall", "-Werror", "-I"]).arg(root().join("include"));
    command.arg(source);
    match command.output() {
        // A C compiler may come without C++.
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("cc1plus") => {
            eprintln!("skipped: no C++")
        }
        _ => drop(done(command)),
    }
}
