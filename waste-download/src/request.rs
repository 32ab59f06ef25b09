//! What was asked for, checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use glob::Pattern;
use reqwest::Url;
use waste_common::cli::Failure;
use waste_common::json;
use waste_common::staging::ORDER;

use crate::args::{Against, Args};

/// Longest token file that is read.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// The revision of who names none.
pub(crate) const MAIN: &str = "main";

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Fetch the files.
    Fetch,
    /// Say what would be fetched.
    DryRun,
    /// Check the files that are there.
    Check(Against),
}

/// What to fetch, from where, and how.
#[derive(Clone)]
pub struct Request {
    /// The repository, `owner/name`.
    pub repo: String,
    /// Where the files go.
    pub dest: PathBuf,
    /// The revision that was named.
    pub revision: Option<String>,
    /// Take what it is now, whatever it was at first.
    pub update: bool,
    /// The files that are wanted.
    pub wanted: Wanted,
    /// The file that says the order.
    pub order: OrderFile,
    /// What to do.
    pub task: Task,
    /// Files at once.
    pub jobs: usize,
    /// The hub.
    pub endpoint: Url,
    /// The token for the hub.
    pub token: Option<Token>,
    /// Bytes a second at most.
    pub limit_rate: Option<u64>,
    /// Failures in a row before giving up.
    pub retries: u32,
    /// Bound of the first wait.
    pub retry_wait: Duration,
    /// When a connection has stalled.
    pub stall: Duration,
    /// Bytes of the disk left free.
    pub reserve: u64,
    /// Wait for room instead of stopping.
    pub wait_for_space: bool,
}

/// A secret that no message shows.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

/// Which files are wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

impl Wanted {
    /// Whether a file is one of them.
    pub fn matches(&self, name: &str) -> bool {
        let any = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        (self.include.is_empty() || any(&self.include)) && !any(&self.exclude)
    }
}

/// Where the order of the files is said.
#[derive(Clone, Debug)]
pub struct OrderFile {
    /// The file.
    pub path: PathBuf,
    /// It was named, so it must be there.
    pub named: bool,
}

impl Request {
    /// Checks the arguments and the environment.
    ///
    /// # Errors
    /// Wrong usage (exit 2), or a token file that cannot be read (exit 3).
    pub fn from_args(args: Args) -> Result<Request, Failure> {
        check_repo(&args.repo)?;
        if let Some(revision) = &args.revision
            && (revision.is_empty() || revision.len() > 255 || revision.chars().any(char::is_control))
        {
            return Err(Failure::usage(format!(
                "--revision {revision:?}: a branch, tag or commit is expected"
            )));
        }
        let globs = |option: &str, globs: Vec<String>| -> Result<Vec<Pattern>, Failure> {
            let parse = |text: String| {
                Pattern::new(&text).map_err(|error| Failure::usage(format!("{option} {text}: {error}")))
            };
            globs.into_iter().map(parse).collect()
        };
        let wanted =
            Wanted { include: globs("--include", args.include)?, exclude: globs("--exclude", args.exclude)? };
        if args.limit_rate.is_some_and(|rate| rate.0 == 0) {
            return Err(Failure::usage("--limit-rate 0: nothing would ever come"));
        }
        let named = args.order_file.is_some();
        let order = OrderFile { path: args.order_file.unwrap_or_else(|| args.dest.join(ORDER)), named };
        let task = match (args.dry_run, args.check) {
            (true, _) => Task::DryRun,
            (false, Some(against)) => Task::Check(against),
            (false, None) => Task::Fetch,
        };
        Ok(Request {
            token: token(args.token_file.as_deref())?,
            endpoint: endpoint(&args.endpoint)?,
            limit_rate: args.limit_rate.map(|rate| rate.0),
            retry_wait: seconds("--retry-wait", args.retry_wait)?,
            stall: seconds("--stall", args.stall)?,
            repo: args.repo,
            dest: args.dest,
            revision: args.revision,
            update: args.update,
            wanted,
            order,
            task,
            jobs: args.jobs.into(),
            retries: args.retries,
            reserve: args.reserve.0,
            wait_for_space: args.wait_for_space,
        })
    }
}

fn check_repo(repo: &str) -> Result<(), Failure> {
    let part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    if repo.split('/').count() <= 2 && repo.split('/').all(part) {
        return Ok(());
    }
    let advice =
        if repo.contains("://") { "; a hub other than the usual one is named by --endpoint" } else { "" };
    Err(Failure::usage(format!(
        "{repo:?} is no repository: owner/name is expected, such as moonshotai/Kimi-K3{advice}"
    )))
}

fn endpoint(text: &str) -> Result<Url, Failure> {
    let bad =
        |problem: &str| Failure::usage(format!("--endpoint: {problem}; such as https://huggingface.co"));
    let url = Url::parse(text).map_err(|error| bad(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(bad("an http or https URL is expected"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(bad("a name and password do not belong into it; use --token-file"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad("it has a query or a fragment"));
    }
    Ok(url)
}

fn seconds(option: &str, seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(time))
        .ok_or_else(|| {
            Failure::usage(format!("{option} {seconds}: seconds from 0.001 to 86400 are expected"))
        })
}

/// The token: from the file that was named, else from the environment.
fn token(file: Option<&Path>) -> Result<Option<Token>, Failure> {
    let variable = |key: &str| std::env::var(key).ok().filter(|value| !value.trim().is_empty());
    let text = match (file, variable("HF_TOKEN"), variable("HF_TOKEN_PATH")) {
        (Some(path), _, _) => read_token(path)?,
        (None, Some(token), _) => token,
        (None, None, Some(path)) => read_token(Path::new(&path))?,
        (None, None, None) => return Ok(None),
    };
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Failure::usage("the token is no single word of ASCII characters"));
    }
    Ok(Some(Token(token.to_owned())))
}

fn read_token(path: &Path) -> Result<String, Failure> {
    let content = json::read_bounded(path, TOKEN_BYTES_MAX)?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_have_an_owner_and_a_name() {
        for good in ["moonshotai/Kimi-K3", "gpt2", "a/b.c_d-e"] {
            check_repo(good).unwrap();
        }
        for bad in
            ["", "a/", "/b", "a/b/c", "../x", "a/..", "https://huggingface.co/a/b", "a b", "a/b?x", "ä/b"]
        {
            assert_eq!(check_repo(bad).unwrap_err().exit.code(), 2, "{bad}");
        }
    }

    #[test]
    fn endpoints_hold_no_secret() {
        assert_eq!(endpoint("http://localhost:8080/mirror").unwrap().port(), Some(8080));
        for bad in ["huggingface.co", "ftp://x", "https://me:secret@h/", "https://h/?t=1"] {
            let failure = endpoint(bad).unwrap_err();
            assert!(failure.exit.code() == 2 && !failure.message.contains("secret"), "{failure}");
        }
    }

    #[test]
    fn globs_match_across_directories() {
        let of = |include: &[&str], exclude: &[&str], name: &str| {
            let patterns = |list: &[&str]| list.iter().map(|text| Pattern::new(text).unwrap()).collect();
            Wanted { include: patterns(include), exclude: patterns(exclude) }.matches(name)
        };
        assert!(of(&[], &[], "a/b") && of(&["*.json"], &[], "a/b.json") && of(&["a/*", "x"], &[], "x"));
        assert!(
            !of(&["*.json"], &[], "b.txt") && !of(&[], &["a/*"], "a/b") && !of(&["*"], &["*.bin"], "x.bin")
        );
    }

    #[test]
    fn times_are_bounded() {
        assert_eq!(seconds("--stall", 0.5).unwrap(), Duration::from_millis(500));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e9] {
            assert!(seconds("--stall", bad).is_err());
        }
    }
}
