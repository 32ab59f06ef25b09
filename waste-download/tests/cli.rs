//! What the tool does when all goes well, and what it says when it cannot be done.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Case, REPO, SHARD, tree};
use waste_tests::hub::{Fault, File, noise};
use waste_tests::tool::Ran;

#[test]
fn everything_is_fetched_checked_and_recorded() {
    let case = Case::usual();
    let result = case.done(&[]);
    case.identical();
    assert_eq!(result["checkpoint"], case.dest().to_str().unwrap());
    assert_eq!(result["commit"], case.hub.main());
    let numbers = ["files", "bytes", "fetched_bytes"].map(|key| result[key].as_u64().unwrap());
    assert_eq!(numbers, [3, 400_009, 400_009]);
    let state = case.state();
    assert_eq!((&state["version"], &state["repo"]), (&json!(1), &json!(REPO)));
    for (_, file) in state["files"].as_object().unwrap() {
        assert!(file["done"] == true && file["sha256"].as_str().unwrap().len() == 64, "{state}");
    }
    // The second run finds nothing to do.
    case.hub.forget();
    assert_eq!(case.done(&[])["fetched_bytes"], 0);
    assert_eq!(case.hub.requests().len(), 1);
}

#[test]
fn the_result_for_people_is_a_line() {
    let ran = Case::usual().run(&[]).done();
    assert!(
        ran.stdout.contains("3 files of owner/model") && ran.stdout.lines().count() == 1,
        "{}",
        ran.stdout
    );
}

#[test]
fn only_what_is_wanted_is_fetched() {
    let case = Case::usual();
    case.done(&["--include", "*.json", "--include", "*extra*"]);
    let names: Vec<_> = tree(&case.dest()).into_keys().filter(|name| !name.starts_with(".waste")).collect();
    assert_eq!(names, ["config.json", "sub/dir/extra weights.bin"]);
    case.done(&["--exclude", "*.safetensors", "--exclude", "sub/*"]);
    assert!(!case.dest().join(SHARD).exists());
    assert!(case.state()["files"]["sub/dir/extra weights.bin"]["done"] == true);
    case.run(&["--include", "*.gguf", "--json"]).error(5, "refused");
    case.run(&["--include", "[", "--json"]).error(2, "usage");
}

#[test]
fn a_dry_run_says_what_is_missing_and_makes_nothing() {
    let case = Case::usual();
    let plan = case.done(&["--dry-run"]);
    assert!(!case.dest().exists());
    let numbers = ["files", "bytes", "missing_files", "missing_bytes", "disk_needed_bytes"];
    let numbers = numbers.map(|key| plan[key].as_u64().unwrap());
    assert_eq!(numbers, [3, 400_009, 3, 400_009, 400_009]);
    assert_eq!(plan["disk_fits"], true);
    case.done(&["--include", "*.json"]);
    let plan = case.done(&["--dry-run"]);
    assert_eq!((&plan["missing_files"], &plan["missing_bytes"]), (&json!(2), &json!(400_000)));
    let ran = case.run(&["--dry-run", "--reserve", "1000000T"]).exits(1);
    assert!(ran.stdout.contains("does NOT fit"), "{}", ran.stdout);
}

#[test]
fn a_disk_that_is_too_small_is_noticed_before_anything_is_fetched() {
    let case = Case::usual();
    let error = case.run(&["--reserve", "1000000T", "--json"]).error(4, "disk_full");
    assert_eq!(error["needed_bytes"], 400_009);
    assert_eq!(case.hub.requests().len(), 1);
}

#[test]
fn a_check_tells_absent_short_long_and_corrupt_apart_and_the_next_run_mends_them() {
    let names = ["absent", "corrupt", "good", "long", "short"];
    let files = names.map(|name| File::large(name, noise(50_000, name.len() as u64)));
    let case = Case::new(files.into_iter().chain([File::small("tiny", "tiny\n")]).collect());
    case.run(&["--check", "--json"]).error(3, "no_state");
    case.done(&[]);
    case.hub.forget();
    assert_eq!(case.done(&["--check"])["ok"], true);
    let path = |name: &str| case.dest().join(name);
    let damage = || {
        fs::remove_file(path("absent")).unwrap();
        fs::write(path("short"), &noise(50_000, 5)[..49_999]).unwrap();
        fs::write(path("long"), noise(50_001, 4)).unwrap();
        let mut content = noise(50_000, 7);
        content[49_999] ^= 1;
        fs::write(path("corrupt"), content).unwrap();
    };
    damage();
    let report = case.run(&["--check", "--json"]).exits(1).json("waste-download/1");
    let kinds = |report: &Value| -> Vec<String> {
        let problems = report["problems"].as_array().unwrap();
        problems
            .iter()
            .map(|p| format!("{} {}", p["file"].as_str().unwrap(), p["kind"].as_str().unwrap()))
            .collect()
    };
    let expected = ["absent absent", "corrupt corrupt", "long long", "short short"];
    assert_eq!(kinds(&report), expected);
    assert!(case.hub.requests().is_empty());
    let result = case.done(&[]);
    assert_eq!(result["fetched_bytes"], 4 * 50_000);
    assert!(case.hub.fetches("good").is_empty());
    case.identical();
    damage();
    assert_eq!(kinds(&case.run(&["--check=server", "--json"]).exits(1).json("waste-download/1")), expected);
    assert!(case.run(&["--check"]).exits(1).stdout.contains("4 NOT right"));
}

#[test]
fn files_that_are_there_already_are_taken_if_they_are_right() {
    let case = Case::usual();
    fs::create_dir_all(case.dest().join("sub/dir")).unwrap();
    fs::write(case.dest().join(SHARD), &*case.files[1].content).unwrap();
    fs::write(case.dest().join("sub/dir/extra weights.bin"), noise(100_000, 9)).unwrap();
    fs::write(case.dest().join("config.json"), "{}").unwrap();
    let ran = case.run(&["--json"]).done();
    assert_eq!(ran.json("waste-download/1")["fetched_bytes"], 100_009);
    assert_eq!(ran.stderr.matches("\"quarantined\"").count(), 2, "{}", ran.stderr);
    assert!(case.hub.fetches(SHARD).is_empty());
    case.identical();
}

#[cfg(unix)]
#[test]
fn nothing_is_written_through_a_link() {
    let case = Case::usual();
    fs::create_dir_all(case.dest()).unwrap();
    let victim = case.dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, case.dest().join("config.json")).unwrap();
    case.run(&["--json"]).error(3, "not_a_file");
    fs::remove_file(case.dest().join("config.json")).unwrap();
    fs::create_dir_all(case.dest().join(".waste-parts")).unwrap();
    std::os::unix::fs::symlink(&victim, case.dest().join(".waste-parts/config.json.part")).unwrap();
    case.run(&["--json"]).error(3, "not_a_file");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}

/// Nothing comes to be where a link of a directory leads, and nothing is taken away there.
#[cfg(unix)]
#[test]
fn links_of_directories_do_not_lead_out() {
    for link in ["sub", "sub/dir", ".waste-parts"] {
        let case = Case::usual();
        let outside = case.dir.path().join("outside");
        fs::create_dir_all(outside.join("dir/empty")).unwrap();
        fs::create_dir_all(outside.join("sub/dir")).unwrap();
        // As if they were ours, and wrong.
        for name in ["extra weights.bin", "dir/extra weights.bin", "config.json.part", "config.json.journal"]
        {
            fs::write(outside.join(name), "precious").unwrap();
        }
        let before = support::tree(&outside);
        let place = case.dest().join(link);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&outside, &place).unwrap();
        let error = case.run(&["--json"]).error(3, "not_a_directory");
        assert_eq!(error["file"], place.to_str().unwrap());
        assert_eq!(support::tree(&outside), before);
        assert!(outside.join("dir/empty").is_dir() && outside.join("sub/dir").is_dir());
        fs::remove_file(place).unwrap();
        case.done(&[]);
        case.identical();
        // Nor when there is nothing left to do.
        std::os::unix::fs::symlink(&outside, case.dest().join(".waste-parts")).unwrap();
        case.done(&[]);
        assert!(outside.join("dir/empty").is_dir() && support::tree(&outside) == before);
    }
}

/// What is in the directory may have been written by anybody.
#[test]
fn broken_state_is_refused_or_worth_nothing() {
    let case = Case::usual();
    case.done(&[]);
    let (state, parts) = (case.dest().join(".waste-download.json"), case.dest().join(".waste-parts"));
    let sound = fs::read_to_string(&state).unwrap();
    for (content, code) in [
        (String::new(), "invalid_json"),
        ("[".repeat(1 << 20), "invalid_json"),
        ("null".to_owned(), "bad_state"),
        ("{}".to_owned(), "bad_state"),
        (sound.replace("\"version\":1", "\"version\":2"), "state_version"),
        (sound.replace("config.json", "../config.json"), "bad_state"),
        (sound.replace(":300000,", ":-1,"), "bad_state"),
        (sound.replace(":300000,", ":1e99,"), "bad_state"),
    ] {
        assert_ne!(content, sound);
        fs::write(&state, &content).unwrap();
        for args in [&["--json"][..], &["--json", "--dry-run"], &["--json", "--check"]] {
            case.run(args).error(3, code);
        }
        assert_eq!(fs::read_to_string(&state).unwrap(), content);
    }
    // Lengths beyond all bounds are only wrong ones.
    fs::write(&state, sound.replace(":300000,", &format!(":{},", u64::MAX))).unwrap();
    let checked = case.run(&["--json", "--check"]).exits(1).json("waste-download/1");
    assert_eq!(checked["problems"][0]["kind"], "short");
    assert_eq!(case.done(&[])["fetched_bytes"], 0);
    // A journal of anything, beside a part of anything.
    fs::remove_file(case.dest().join(SHARD)).unwrap();
    fs::remove_file(&state).unwrap();
    fs::create_dir_all(&parts).unwrap();
    fs::write(parts.join(format!("{SHARD}.part")), noise(400_000, 7)).unwrap();
    for journal in [&b""[..], b"\n", b"{}\n", &[0xff; 4096], &noise(100_000, 8)] {
        fs::write(parts.join(format!("{SHARD}.journal")), journal).unwrap();
        assert_eq!(case.done(&["--dry-run"])["missing_bytes"], 300_000);
    }
    assert_eq!(case.done(&[])["fetched_bytes"], 300_000);
    case.identical();
}

/// More than any disk has: told before the first byte, not by a number that has wrapped around.
#[test]
fn lengths_without_bound_are_no_trouble() {
    let siblings = |size: u64| {
        let file =
            |at: u64| json!({"rfilename": format!("f{at}"), "lfs": {"sha256": "0".repeat(64), "size": size}});
        json!({"sha": "0".repeat(40), "siblings": (0..8).map(file).collect::<Vec<_>>()}).to_string()
    };
    let case = Case::one(1000);
    case.hub.fault("", Fault::Body(siblings(i64::MAX as u64).into_bytes()));
    let error = case.run(&["--json"]).error(4, "disk_full");
    assert_eq!(error["needed_bytes"], u64::MAX);
    for size in [u64::MAX, i64::MAX as u64 + 1] {
        case.hub.fault("", Fault::Body(siblings(size).into_bytes()));
        case.run(&["--json"]).error(3, "bad_answer");
    }
    assert!(!case.dest().join(".waste-parts").exists());
}

/// The hub knows who asks; the host it leads to does not.
#[test]
fn the_token_goes_to_the_hub_only_and_is_never_shown() {
    let case = Case::usual();
    case.hub.demand_token("hf_secret");
    case.run(&["--json"]).error(5, "unauthorized");
    let file = case.dir.path().join("token");
    fs::write(&file, "hf_secret\n").unwrap();
    let path = file.to_str().unwrap();
    for (number, (key, value)) in
        [("HF_TOKEN", "hf_secret"), ("HF_TOKEN_PATH", path), ("X", "")].iter().enumerate()
    {
        case.hub.forget();
        let _ = fs::remove_dir_all(case.dest());
        let named: &[&str] = if number == 2 { &["--token-file", path] } else { &[] };
        // The one that is named wins.
        let mut command = case.command(named);
        let other = if number == 2 { ("HF_TOKEN", "hf_other") } else { (*key, *value) };
        let ran = Ran::from_output(command.env(other.0, other.1).output().unwrap()).done();
        assert!(!format!("{}{}", ran.stdout, ran.stderr).contains("hf_"), "{}", ran.stderr);
        let requests = case.hub.requests();
        for request in &requests {
            let expected = (!request.cdn).then(|| "Bearer hf_secret".to_owned());
            assert_eq!(request.authorization, expected, "{request:?}");
        }
        assert!(requests.iter().any(|request| request.cdn));
        assert!(!tree(&case.dest()).values().any(|content| content.windows(3).any(|text| text == b"hf_")));
    }
    let ran = Ran::from_output(case.command(&["--json"]).env("HF_TOKEN", "hf_a b").output().unwrap());
    assert!(!ran.error(2, "usage")["message"].as_str().unwrap().contains("hf_"));
}

#[test]
fn a_proxy_of_the_environment_is_used() {
    let case = Case::usual();
    let mut command = case.command(&["--json", "--include", "*.json"]);
    let url = case.hub.url();
    let mut proxied = waste_tests::tool::process("waste-download");
    // An emulator's first argument is the tool.
    let own = command.get_args().skip(proxied.get_args().count());
    let args: Vec<_> =
        own.map(|arg| if arg == url.as_str() { "http://hub.invalid".as_ref() } else { arg }).collect();
    proxied.args(args).env("HTTP_PROXY", &url);
    Ran::from_output(proxied.output().unwrap()).done();
    assert!(case.hub.requests().iter().all(|request| request.proxied));
    assert_eq!(case.hub.requests().len(), 2);
    // Without it nobody knows the host.
    fs::remove_dir_all(case.dest()).unwrap();
    command.env("HTTP_PROXY", "http://127.0.0.1:1").args(["--retries", "0"]);
    Ran::from_output(command.output().unwrap()).error(5, "network");
}

#[test]
fn each_refusal_has_its_advice_and_is_not_tried_again() {
    for (status, code, words) in [
        (401, "unauthorized", "private, or its name is misspelt"),
        (403, "forbidden", "accept its licence"),
        (404, "not_found", "no such repository, revision or file"),
        (400, "refused", "400"),
    ] {
        for place in ["", SHARD] {
            let case = Case::one(1000);
            case.hub.fault(place, Fault::Status(status, vec![]));
            let error = case.run(&["--json"]).error(5, code);
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
            let asked = case.hub.requests().iter().filter(|request| request.status == status).count();
            assert_eq!(asked, 1, "{status} {place:?}");
            case.done(&[]);
            case.identical();
        }
    }
    let case = Case::one(1000);
    case.run(&["--revision", "v9", "--json"]).error(5, "not_found");
}

#[test]
fn one_file_that_is_gone_does_not_keep_the_others() {
    let case = Case::usual();
    case.hub.always(SHARD, Fault::Status(404, vec![]));
    case.run(&["--json", "--jobs", "1"]).error(5, "not_found");
    assert_eq!(case.state()["files"]["sub/dir/extra weights.bin"]["done"], true);
    case.hub.heal();
    assert_eq!(case.done(&[])["fetched_bytes"], 300_000);
    case.identical();
}

#[test]
fn a_listing_that_cannot_be_used_is_refused() {
    for body in [&b"<html>"[..], b"{}", br#"{"sha":"x","siblings":[]}"#] {
        let case = Case::one(1000);
        case.hub.fault("", Fault::Body(body.to_vec()));
        case.run(&["--json"]).error(3, "bad_answer");
    }
    let case = Case::new(vec![File::small("../escape", "x")]);
    case.run(&["--json"]).error(3, "bad_answer");
    assert!(!case.dir.path().join("escape").exists());
}

#[test]
fn wrong_usage_is_told_before_any_request() {
    let case = Case::one(1000);
    for args in [
        &["--retry-wait", "-1"][..],
        &["--stall", "0"],
        &["--jobs", "0"],
        &["--limit-rate", "0"],
        &["--dry-run", "--check"],
        &["--check=everything"],
        &["--revision", ""],
        &["--endpoint", "nowhere"],
    ] {
        case.run(&[args, &["--json"]].concat()).error(2, "usage");
    }
    assert!(case.hub.requests().is_empty() && !case.dest().exists());
}

/// What a branch was at first stays what is fetched.
#[test]
fn a_branch_that_moves_is_followed_only_when_told_to() {
    let mut case = Case::usual();
    let first = case.hub.main();
    case.done(&["--include", "*.json"]);
    let mut files = case.files.clone();
    files[0] = File::small("config.json", "{\"a\": 2}\n");
    files.push(File::small("new.txt", "new\n"));
    let second = case.hub.commit(files.clone());
    assert_eq!(case.done(&[])["commit"], first);
    case.identical();
    assert_eq!(case.done(&["--revision", "main"])["commit"], first);
    let result = case.done(&["--update"]);
    assert_eq!((&result["commit"], &result["fetched_bytes"]), (&json!(second), &json!(9 + 4)));
    case.files = files;
    case.identical();
    let error = case.run(&["--revision", &first[..10], "--json"]).error(5, "not_found");
    assert!(error["message"].as_str().unwrap().contains(&first[..10]));
    assert_eq!(case.done(&["--revision", &first])["commit"], first);
}

#[test]
fn a_directory_holds_one_repository() {
    let case = Case::one(1000);
    case.done(&[]);
    let path = case.dest().join(".waste-download.json");
    let state = fs::read_to_string(&path).unwrap();
    fs::write(&path, state.replace(REPO, "owner/other")).unwrap();
    case.run(&["--json"]).error(3, "other_repository");
    fs::write(&path, state.replace("\"version\":1", "\"version\":2")).unwrap();
    case.run(&["--json"]).error(3, "state_version");
}

#[test]
fn the_second_download_into_a_directory_names_the_first() {
    let case = Case::one(2_000_000);
    case.hub.limit(Some(500_000));
    let mut first = case.command(&[]).stderr(std::process::Stdio::null()).spawn().unwrap();
    let part = case.dest().join(".waste-parts");
    while !part.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = case.run(&["--json"]).error(6, "locked");
    assert_eq!(error["pid"], first.id());
    case.hub.limit(None);
    assert!(first.wait().unwrap().success());
    case.identical();
}

#[test]
fn files_come_in_the_order_that_is_asked_for() {
    let names = ["a", "b", "c", "d"];
    let case = Case::new(names.iter().map(|name| File::large(name, noise(1000, 1))).collect());
    let order = case.dir.path().join("order");
    fs::write(&order, "c\nunknown\na\n").unwrap();
    let fetched = || -> Vec<String> {
        case.hub.settle();
        let requests = case.hub.requests();
        requests.into_iter().filter(|request| request.cdn).filter_map(|request| request.file).collect()
    };
    case.done(&["--jobs", "1", "--order-file", order.to_str().unwrap()]);
    assert_eq!(fetched(), ["c", "a", "b", "d"]);
    // The converter's own is found by itself.
    fs::remove_dir_all(case.dest()).unwrap();
    fs::create_dir_all(case.dest()).unwrap();
    fs::write(case.dest().join(".waste-order"), "d\n").unwrap();
    case.hub.forget();
    case.done(&["--jobs", "1"]);
    assert_eq!(fetched(), ["d", "a", "b", "c"]);
    case.run(&["--order-file", "nowhere", "--json"]).error(5, "refused");
}

#[test]
fn the_order_may_change_while_files_come() {
    let names = ["a", "b", "c", "d"];
    let case = Case::new(names.iter().map(|name| File::large(name, noise(100_000, 1))).collect());
    case.hub.limit(Some(200_000));
    let order = case.dir.path().join("order");
    fs::write(&order, "c\n").unwrap();
    let mut child = case.command(&["--jobs", "1", "--order-file", order.to_str().unwrap()]).spawn().unwrap();
    while !case.hub.requests().iter().any(|request| request.file.as_deref() == Some("c")) {
        std::thread::sleep(Duration::from_millis(1));
    }
    fs::write(&order, "d\nb\n").unwrap();
    assert!(child.wait().unwrap().success());
    case.hub.settle();
    let requests = case.hub.requests().into_iter();
    let fetched: Vec<String> =
        requests.filter(|request| request.cdn).filter_map(|request| request.file).collect();
    assert_eq!(fetched, ["c", "d", "b", "a"]);
    case.identical();
}

#[test]
fn what_was_used_up_is_not_fetched_again() {
    let case = Case::usual();
    case.done(&[]);
    fs::remove_file(case.dest().join(SHARD)).unwrap();
    fs::write(case.dest().join(".waste-reclaimed"), format!("{SHARD}\n")).unwrap();
    let result = case.done(&[]);
    assert_eq!((&result["reclaimed"], &result["fetched_bytes"]), (&json!(1), &json!(0)));
    assert_eq!(case.done(&["--check"])["ok"], true);
    // Unless it never was there.
    fs::remove_file(case.dest().join(".waste-reclaimed")).unwrap();
    assert_eq!(case.done(&[])["fetched_bytes"], 300_000);
}

/// A safetensors file with these tensors of four bytes each.
fn safetensors(names: &[&str]) -> Vec<u8> {
    let header: serde_json::Map<String, Value> = names
        .iter()
        .enumerate()
        .map(|(at, name)| {
            ((*name).to_owned(), json!({"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}))
        })
        .collect();
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(vec![0; 4 * names.len()]);
    file
}

#[test]
fn every_tensor_of_the_index_must_be_there() {
    let index = json!({"weight_map": {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}});
    let with = |first: &[&str]| {
        Case::new(vec![
            File::small("config.json", "{}"),
            File::small("model.safetensors.index.json", index.to_string()),
            File::large("x.safetensors", safetensors(first)),
            File::large("y.safetensors", safetensors(&["c"])),
        ])
    };
    let case = with(&["a", "b"]);
    case.done(&[]);
    let case = with(&["a"]);
    let error = case.run(&["--json"]).error(3, "incomplete_checkpoint");
    assert!(error["message"].as_str().unwrap().contains("`b`"), "{error}");
    // A file that is not wanted is not looked for.
    case.done(&["--exclude", "x.*"]);
}

#[test]
fn progress_is_told_in_json_lines() {
    let case = Case::one(200_000);
    case.hub.limit(Some(100_000));
    let ran = case.run(&["--json"]).done();
    let lines: Vec<Value> = ran.stderr.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let progress: Vec<_> = lines.iter().filter(|line| line["event"] == "progress").collect();
    assert!(progress.len() >= 2, "{}", ran.stderr);
    let last = progress.last().unwrap();
    assert_eq!((&last["schema"], &last["total_bytes"]), (&json!("waste-download/1"), &json!(200_000)));
    assert!(last["bytes"].as_u64().unwrap() > 50_000 && last["files"][0]["file"] == SHARD, "{last}");
    assert!(last["eta_seconds"].is_u64());
    assert!(case.run(&["--json", "--quiet"]).stderr.contains("cannot be used with"));
}

#[test]
fn the_rate_can_be_limited() {
    let case = Case::one(300_000);
    let start = Instant::now();
    case.done(&["--limit-rate", "300000"]);
    assert!(start.elapsed() > Duration::from_millis(900));
    case.identical();
}

/// On a terminal: a bar for each file under way and one for all, with sizes, rate and the time that is left; and none of
/// it is left at the end.
#[test]
#[cfg(target_os = "linux")]
fn a_terminal_shows_bars() {
    let case = Case::usual();
    case.hub.limit(Some(100_000));
    let plain = case.command(&[]);
    let words = std::iter::once(plain.get_program()).chain(plain.get_args());
    let quoted = words.map(|word| format!("'{}' ", word.to_str().unwrap())).collect::<String>();
    let mut command = std::process::Command::new("script");
    command.args(["-qec", &format!("stty cols 120 rows 40; exec {quoted}"), "/dev/null"]);
    command.env("TERM", "xterm").stdin(std::process::Stdio::null());
    let shown = command.output().unwrap();
    assert!(shown.status.success(), "{shown:?}");
    let text = String::from_utf8_lossy(&shown.stdout);
    // What stands between two movements of the cursor is a state of a line.
    let lines: Vec<&str> = text.split(['\r', '\n', '\x1b']).collect();
    for (name, size) in
        [(SHARD, "292.97 KiB"), ("extra weights.bin", "97.66 KiB"), ("download", "390.63 KiB")]
    {
        let bar = |line: &&&str| {
            line.contains(name)
                && line.contains(&format!("/{size} "))
                && line.contains("iB/s ")
                && line.ends_with('s')
        };
        assert!(lines.iter().any(|line| bar(&line)), "{name}: {lines:#?}");
    }
    case.identical();
}
