//! Decoding gives the same numbers, bit for bit, whatever the threads, the budget, the reads and the kernels.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use serde_json::Value;
use waste_tests::files::Model;
use waste_tests::tool::{Ran, emulated, run, tool};

/// What must change nothing: arguments and environment.
type Setting = (Vec<String>, Option<(&'static str, &'static str)>);

fn settings(model: &Model) -> Vec<Setting> {
    let sizes = run("waste-plan", [model.arg(), "--json", "--threads", "2"]).done().json("waste-plan/1");
    let floor = sizes["floor_bytes"].as_u64().unwrap();
    let one = floor + sizes["working_set_bytes"].as_u64().unwrap();
    let args = |args: &[&str]| (args.iter().map(|arg| (*arg).to_owned()).collect(), None);
    let mut all = vec![
        args(&["--threads", "1"]),
        args(&["--threads", "2", "--budget", &floor.to_string()]),
        args(&["--threads", "2", "--budget", &one.to_string()]),
        args(&["--budget", "max"]),
        args(&["--no-direct-io"]),
        args(&["--verify"]),
        args(&["--threads", "3", "--ctx", "100"]),
    ];
    let mut switch = |key, value| all.push((Vec::new(), Some((key, value))));
    switch("WASTE_LOOKAHEAD", "0");
    switch("WASTE_LOOKAHEAD", "6");
    switch("WASTE_IO_DEPTH", "0");
    switch("WASTE_IO_DEPTH", "1");
    switch("WASTE_IO_DEPTH", "4");
    for name in waste_engine::kernels::Kernels::NAMES {
        switch("WASTE_KERNELS", name);
    }
    all
}

fn ran(args: &[&str], (more, switch): &Setting) -> Ran {
    let mut command = tool("waste-run");
    command.args(args).args(more).envs(*switch);
    Ran::of(&mut command)
}

/// Whether this machine lacks the kernel set that the setting asks for.
fn unavailable(ran: &Ran, (_, switch): &Setting) -> bool {
    switch.is_some_and(|(key, _)| key == "WASTE_KERNELS") && ran.exit == Some(2)
}

#[test]
fn text_and_logits_are_the_same_in_every_setting() {
    // Dozens of runs: the kernels' own tests compare the bits on an emulated CPU.
    if emulated() {
        return;
    }
    let model = Model::converted("models/k3-tales");
    let decode = [model.arg(), "Once upon a time", "-n", "24", "--json"];
    let expected: Value = ran(&decode, &Default::default()).done().json("waste-run/1");
    assert!(expected["text"].as_str().unwrap().starts_with(" there was"), "{expected}");
    let file = model.beside("logits.safetensors");
    let path = file.to_str().unwrap();
    // Token by token, and as one chunk.
    let eval = ["eval", model.arg(), "Once upon a time there was a king", "--save-logits", path, "--json"];
    ran(&eval, &Default::default()).done();
    let logits = std::fs::read(&file).unwrap();
    let mut compared = 0;
    for setting in settings(&model) {
        let text = ran(&decode, &setting);
        if unavailable(&text, &setting) {
            continue;
        }
        let text = text.done().json("waste-run/1");
        assert_eq!((&text["text"], &text["ids"]), (&expected["text"], &expected["ids"]), "{setting:?}");
        ran(&eval, &setting).done();
        let found = std::fs::read(&file).unwrap();
        assert!(found == logits, "{setting:?}: the logits differ");
        compared += 1;
    }
    assert!(compared >= 12, "{compared}");
}
