//! A disk that fills up on the way: a small one in memory, in a name space of its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::process::Command;

use support::{Case, SHARD};

/// Runs a script in which `$D` is an empty disk of 16 MiB. None where the system does not let us.
fn on_a_small_disk(case: &Case, script: &str) -> Option<std::process::Output> {
    let disk = case.dir.path().join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "bash", "-euc", script]);
        command.env("D", &disk).output()
    };
    let mount = "mount -t tmpfs -o size=16m none $D";
    if !unshare(mount).is_ok_and(|output| output.status.success()) {
        eprintln!("no name spaces here: nothing was tested");
        return None;
    }
    Some(unshare(&format!("{mount}\n{script}")).unwrap())
}

/// The command, with its files on the small disk.
fn command(case: &Case, args: &[&str]) -> String {
    let command = case.command(args);
    let dest = case.dest();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| if word == dest { "$D/dest".to_owned() } else { format!("'{}'", word.display()) })
        .collect::<Vec<_>>()
        .join(" ")
}

const WAIT_FOR_A_PART: &str = "until test $(stat -c %s $D/dest/.waste-parts/*.part 2>/dev/null || echo 0) -gt 1000000; \
                               do sleep 0.02; done";

#[test]
fn a_full_disk_ends_it_resumably() {
    if waste_tests::tool::process("waste-download").get_program().to_string_lossy().contains("qemu") {
        return;
    }
    let case = Case::one(8 << 20);
    case.hub.limit(Some(4 << 20));
    let download = command(&case, &["--json"]);
    let script = format!(
        "{download} > $D/../out.json & pid=$!
        {WAIT_FOR_A_PART}
        head -c 16m /dev/zero > $D/filler || true
        code=0; wait $pid || code=$?
        test $code = 4
        rm $D/filler
        {download} > $D/../again.json
        cmp $D/dest/{SHARD} $D/../expected"
    );
    std::fs::write(case.dir.path().join("expected"), &*case.files[0].content).unwrap();
    let Some(output) = on_a_small_disk(&case, &script) else { return };
    let read = |name: &str| std::fs::read_to_string(case.dir.path().join(name)).unwrap_or_default();
    assert!(output.status.success(), "{output:?} {} {}", read("out.json"), read("again.json"));
    assert!(read("out.json").contains("disk_full"), "{}", read("out.json"));
    let again: serde_json::Value = serde_json::from_str(&read("again.json")).unwrap();
    let fetched = again["fetched_bytes"].as_u64().unwrap();
    assert!(fetched < (8 << 20) - 900_000, "{fetched}");
}

#[test]
fn who_waits_for_space_goes_on_when_there_is_some() {
    if waste_tests::tool::process("waste-download").get_program().to_string_lossy().contains("qemu") {
        return;
    }
    let case = Case::one(8 << 20);
    case.hub.limit(Some(8 << 20));
    let download = command(&case, &["--wait-for-space", "--retries", "100"]);
    let script = format!(
        "{download} 2> $D/../said & pid=$!
        {WAIT_FOR_A_PART}
        head -c 16m /dev/zero > $D/filler || true
        until grep -q 'waiting for room' $D/../said; do sleep 0.02; done
        rm $D/filler
        wait $pid
        cmp $D/dest/{SHARD} $D/../expected"
    );
    std::fs::write(case.dir.path().join("expected"), &*case.files[0].content).unwrap();
    let Some(output) = on_a_small_disk(&case, &script) else { return };
    assert!(output.status.success(), "{output:?}");
}
