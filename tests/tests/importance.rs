//! Importance of input columns, from the measurement to the container.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::fs;

use waste_tests::files::data;
use waste_tests::tool::{arg, run};

#[test]
fn what_experts_were_given_weighs_in_a_conversion() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let checkpoint = data("golden/tiny-linear/ckpt");
    let (plain, weighed, importance) = (place("plain.waste"), place("weighed.waste"), place("importance"));
    let convert = |to: &std::path::Path, more: &[&str]| {
        let args = [arg(&checkpoint), arg(to), "--effort", "fast", "--cb-sample", "1024", "-q"];
        run("waste-convert", [&args[..], more].concat())
    };
    convert(&plain, &[]).done();

    let text = place("text");
    fs::write(&text, "Once upon a time there was a small engine that could read more than it could hold.")
        .unwrap();
    let measure = |to: &std::path::Path| {
        let args = ["perplexity", arg(&plain), "--file", arg(&text), "-q", "--save-importance", arg(to)];
        run("waste-run", args).done();
        fs::read(to).unwrap()
    };
    let measured = measure(&importance);
    assert_eq!(measure(&place("again")), measured);

    convert(&weighed, &["--importance", arg(&importance)]).done();
    let bank = |container: &std::path::Path| fs::read(container.join("experts-L1.bin")).unwrap();
    assert_eq!(bank(&weighed).len(), bank(&plain).len());
    assert_ne!(bank(&weighed), bank(&plain));
    run("waste-verify", [arg(&weighed), "-q"]).done();

    // Another model's measurement, and a broken one, are refused before anything is written.
    fs::write(place("broken"), &measured[..measured.len() / 2]).unwrap();
    let refused = convert(&place("never.waste"), &["--importance", arg(&place("broken"))]);
    assert_ne!(refused.exit, Some(0));
    assert!(!place("never.waste").exists());
}
