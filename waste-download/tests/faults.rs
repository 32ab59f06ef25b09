//! Whatever goes wrong on the way: the file comes whole in the end, and no byte is fetched that was there.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::time::Duration;

use support::{Case, SHARD};
use waste_tests::hub::{Fault, File, Request, noise};

const SIZE: u64 = 300_000;

/// Runs against these faults of the one large file; the requests for its content.
#[track_caller]
fn through(faults: impl IntoIterator<Item = Fault>) -> (Vec<Request>, String) {
    let case = Case::one(SIZE as usize);
    for fault in faults {
        case.hub.fault(SHARD, fault);
    }
    let ran = case.run(&["--stall", "0.5"]).done();
    case.identical();
    (case.hub.fetches(SHARD), ran.stderr)
}

fn ranges(requests: &[Request]) -> Vec<Option<(u64, u64)>> {
    requests.iter().map(|request| request.range).collect()
}

#[test]
fn a_connection_that_breaks_or_stalls_goes_on_at_the_next_byte() {
    for fault in [Fault::Drop(100_000), Fault::Stall(100_000)] {
        let (requests, stderr) = through([fault.clone(), fault]);
        let rest = |first| Some((first, SIZE - 1));
        assert_eq!(ranges(&requests), [None, rest(100_000), rest(200_000)], "{stderr}");
        assert_eq!(requests.iter().map(|request| request.sent).sum::<u64>(), SIZE);
    }
}

#[test]
fn an_answer_before_the_first_byte_counts_too() {
    let (requests, _) = through([Fault::Drop(0), Fault::Stall(0)]);
    assert_eq!(ranges(&requests), [None, None, None]);
}

#[test]
fn a_server_that_is_busy_is_asked_again() {
    for status in [408, 425, 429, 500, 502, 503, 504, 599] {
        let (requests, stderr) = through([Fault::Status(status, vec![])]);
        assert!(stderr.contains(&status.to_string()), "{stderr}");
        assert_eq!(requests.iter().filter(|request| request.status == status).count(), 1);
    }
}

#[test]
fn a_server_that_wants_to_be_left_alone_is() {
    for headers in
        [vec![("Retry-After", "1".to_owned())], vec![("RateLimit", "\"resolvers\";r=0;t=1".to_owned())]]
    {
        let case = Case::one(1000);
        case.hub.fault(SHARD, Fault::Status(429, headers));
        case.done(&[]);
        let requests = case.hub.requests();
        let refused = requests.iter().position(|request| request.status == 429).unwrap();
        let wait = requests[refused + 1].at - requests[refused].at;
        assert!(wait >= Duration::from_millis(990), "{wait:?}");
    }
}

/// Not only the file whose answer it was.
#[test]
fn all_files_wait_together() {
    let files = (0..6).map(|at| File::large(&format!("f{at}"), noise(1000, at)));
    let case = Case::new(files.collect());
    case.hub.fault("f0", Fault::Status(429, vec![("Retry-After", "1".to_owned())]));
    case.done(&["--jobs", "1", "--retries", "1"]);
    case.identical();
}

#[test]
fn lengths_that_lie_are_not_believed() {
    for fault in [Fault::Short(10), Fault::Long(10)] {
        let (requests, stderr) = through([fault.clone(), Fault::Drop(100_000), fault]);
        assert!(stderr.contains("were expected"), "{stderr}");
        assert_eq!(ranges(&requests)[2..], [Some((100_000, SIZE - 1)); 2]);
    }
    let (_, stderr) = through([Fault::Headers(vec![("X-Linked-Size", "7".to_owned())])]);
    assert!(stderr.contains("has 7 bytes"), "{stderr}");
}

#[test]
fn another_range_than_the_one_asked_for_is_not_taken() {
    let (requests, stderr) = through([Fault::Drop(100_000), Fault::OtherRange]);
    assert!(stderr.contains("100000 to 299999 were asked for, 100001 to"), "{stderr}");
    assert_eq!(requests.len(), 3);
}

#[test]
fn a_server_without_ranges_starts_again_and_that_is_said() {
    let (requests, stderr) = through([Fault::Drop(100_000), Fault::NoRanges]);
    assert!(stderr.contains("does not send parts of files"), "{stderr}");
    assert_eq!(requests.len(), 2);
    // One that never gets further is given up at last.
    let case = Case::one(SIZE as usize);
    for _ in 0..8 {
        case.hub.fault(SHARD, Fault::Drop(100_000));
    }
    case.hub.always(SHARD, Fault::NoRanges);
    case.done(&[]);
    case.identical();
}

#[test]
fn a_wrong_byte_is_found_and_only_that_file_is_fetched_again() {
    let case = Case::usual();
    case.hub.fault(SHARD, Fault::Flip(123_456));
    case.hub.fault("config.json", Fault::Flip(0));
    let ran = case.run(&[]).done();
    assert_eq!(ran.stderr.matches("its content is wrong").count(), 2, "{}", ran.stderr);
    case.identical();
    let counts = ["config.json", SHARD, "sub/dir/extra weights.bin"].map(|name| case.hub.fetches(name).len());
    assert_eq!(counts, [2, 2, 1]);
}

#[test]
fn a_file_that_is_always_wrong_is_kept_aside_and_named() {
    let case = Case::usual();
    case.hub.always(SHARD, Fault::Flip(7));
    let error = case.run(&["--json"]).error(3, "corrupt");
    assert_eq!(error["file"], SHARD);
    let kept = fs::read(error["kept"].as_str().unwrap()).unwrap();
    assert_eq!(kept[7], case.files[1].content[7] ^ 1);
    assert!(!case.dest().join(SHARD).exists());
    assert_eq!(case.hub.fetches(SHARD).len(), 3);
    let state = case.state();
    let done = |name: &str| state["files"][name]["done"].as_bool().unwrap();
    assert!(done("config.json") && done("sub/dir/extra weights.bin") && !done(SHARD));
    case.hub.heal();
    case.done(&[]);
    case.identical();
}

#[test]
fn a_file_that_changes_on_the_way_starts_again() {
    let other = "0".repeat(40);
    for headers in [
        vec![("X-Linked-ETag", "\"other\"".to_owned())],
        vec![("X-Linked-ETag", format!("\"{}\"", "0".repeat(64)))],
        vec![("X-Repo-Commit", other)],
    ] {
        let (requests, stderr) = through([Fault::Drop(100_000), Fault::Headers(headers)]);
        assert!(stderr.contains("from its beginning again"), "{stderr}");
        assert_eq!(ranges(&requests), [None, Some((100_000, SIZE - 1)), None]);
    }
    // The same of a file without redirects, and between two runs.
    let case = Case::new(vec![File::small("a", noise(50_000, 1))]);
    case.hub.fault("a", Fault::Drop(20_000));
    case.run(&["--retries", "0", "--json"]).error(5, "network");
    case.hub.fault("a", Fault::Headers(vec![("ETag", "\"other\"".to_owned())]));
    let ran = case.run(&[]).done();
    assert!(ran.stderr.contains("it has changed on the server"), "{}", ran.stderr);
    case.identical();
    // For ever, it is given up.
    let case = Case::one(1000);
    case.hub.always(SHARD, Fault::Headers(vec![("X-Repo-Commit", "f".repeat(40))]));
    case.run(&["--json"]).error(5, "changing");
}

#[test]
fn an_address_that_has_expired_is_renewed() {
    for status in [401, 403, 404, 410] {
        let case = Case::one(SIZE as usize);
        case.hub.fault(SHARD, Fault::Drop(100_000));
        case.hub.fault(SHARD, Fault::CdnStatus(status));
        let ran = case.run(&[]).done();
        assert!(
            ran.stderr.contains("may have expired") && !ran.stderr.contains("signature"),
            "{}",
            ran.stderr
        );
        case.identical();
        let asked: Vec<_> = case.hub.requests().into_iter().filter(|request| request.status == 302).collect();
        assert_eq!(asked.len(), 3);
    }
}

#[test]
fn a_network_that_is_gone_ends_resumably() {
    let case = Case::one(SIZE as usize);
    case.hub.fault(SHARD, Fault::Drop(100_000));
    case.hub.always(SHARD, Fault::Drop(0));
    let error = case.run(&["--retries", "3", "--json"]).error(5, "network");
    assert_eq!(error["tries"], 4);
    case.hub.heal();
    assert_eq!(case.done(&[])["fetched_bytes"], SIZE - 100_000);
    case.identical();
    // Nor is there anyone at all.
    let case = Case::one(1000);
    case.run(&["--retries", "1", "--json", "--endpoint", "http://127.0.0.1:1"]).error(5, "network");
}

/// After a crash of the machine the journal may be there, but not the data.
#[test]
fn what_the_disk_lost_is_fetched_again_and_only_that() {
    let case = Case::one(8 << 20);
    case.hub.fault(SHARD, Fault::Drop(6 << 20));
    case.run(&["--retries", "0", "--json"]).error(5, "network");
    let part = case.dest().join(".waste-parts").join(format!("{SHARD}.part"));
    let mut content = fs::read(&part).unwrap();
    assert_eq!(content.len(), 6 << 20);
    // A hole in the middle, and a tail that never arrived.
    content[1 << 20..][..5000].fill(0);
    content.truncate(5 << 20);
    fs::write(&part, &content).unwrap();
    let fetched = case.done(&[])["fetched_bytes"].as_u64().unwrap();
    case.identical();
    let missing = (3 << 20) + 5000;
    assert!(fetched >= missing && fetched < missing + (2 << 20), "{fetched}");
    assert!(case.hub.fetches(SHARD).len() >= 3);
}

#[test]
fn a_partial_file_without_its_journal_is_worth_nothing() {
    let case = Case::one(SIZE as usize);
    let parts = case.dest().join(".waste-parts");
    fs::create_dir_all(&parts).unwrap();
    fs::write(parts.join(format!("{SHARD}.part")), noise(SIZE as usize + 5, 99)).unwrap();
    assert_eq!(case.done(&[])["fetched_bytes"], SIZE);
    case.identical();
}
