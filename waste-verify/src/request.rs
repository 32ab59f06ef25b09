//! What was asked for, checked.

use std::path::PathBuf;

use waste_common::checkpoint::Checkpoint;
use waste_common::cli::chain::Kind;
use waste_common::cli::{Failure, resolve_model};

use crate::Args;
use crate::sidecars::SUMS;
use crate::sums;

/// How many experts of a layer are compared with the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampling {
    /// So many, evenly spaced.
    Evenly(u32),
    /// Every one.
    All,
}

impl Sampling {
    /// The experts to compare, of `count`.
    pub fn of(self, count: u32) -> impl Iterator<Item = u16> {
        let wanted = match self {
            Sampling::Evenly(wanted) => wanted.min(count),
            Sampling::All => count,
        };
        // At most 65536 experts, so ids fit.
        (0..wanted).map(move |i| (u64::from(i) * u64::from(count) / u64::from(wanted)) as u16)
    }
}

/// A comparison with the checkpoint.
#[derive(Debug, Clone)]
pub struct SourceRequest {
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// The experts to compare.
    pub sampling: Sampling,
}

/// What to verify and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// The container's directory.
    pub container: PathBuf,
    /// Headers and sizes only.
    pub quick: bool,
    /// Also what the page cache holds is read from the disk.
    pub from_disk: bool,
    /// The manifest's SHA-256 that is expected, lower-case hex.
    pub expect_manifest: Option<String>,
    /// A list of checksums to compare with.
    pub check_sums: Option<PathBuf>,
    /// A list of checksums to write.
    pub write_sums: Option<PathBuf>,
    /// Where what was found sound is kept until the end.
    pub resume: Option<PathBuf>,
    /// Another copy, from which what is bad is copied.
    pub repair_from: Option<PathBuf>,
    /// Give checksums to a container without.
    pub seal: bool,
    /// The checkpoint to compare with.
    pub source: Option<SourceRequest>,
    /// Threads.
    pub threads: usize,
}

impl Request {
    /// The plain request: everything in `container`, on one thread per CPU.
    pub fn new(container: PathBuf) -> Self {
        Request {
            container,
            quick: false,
            from_disk: false,
            expect_manifest: None,
            check_sums: None,
            write_sums: None,
            resume: None,
            repair_from: None,
            seal: false,
            source: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Checks the arguments; reads standard input for `-`.
    ///
    /// # Errors
    /// Wrong usage (exit 2), or what the previous tool said.
    pub fn from_args(args: Args) -> Result<Self, Failure> {
        let model = resolve_model(&args.container)?;
        let container = model.expect_kind(Kind::Container)?.to_owned();
        let expect_manifest = args.expect_manifest.map(|sum| {
            sums::parse_digest(&sum)
                .ok_or_else(|| Failure::usage(format!("--expect-manifest {sum}: 64 hex digits are expected")))
        });
        let sampling = match args.experts.as_deref() {
            None => Sampling::Evenly(4),
            Some("all") => Sampling::All,
            Some(text) => match text.parse() {
                Ok(count @ 1..) => Sampling::Evenly(count),
                _ => return Err(Failure::usage(format!("--experts {text}: a number from 1, or all"))),
            },
        };
        let write_sums = args.sums.map(|file| file.unwrap_or_else(|| container.join(SUMS)));
        let plain = Request::new(container);
        Ok(Request {
            quick: args.quick,
            // What was repaired is in the page cache, and right there.
            from_disk: args.from_disk || args.repair,
            expect_manifest: expect_manifest.transpose()?,
            check_sums: args.check_sums,
            write_sums,
            resume: args.resume,
            repair_from: args.from,
            seal: args.seal,
            source: args.source.map(|dir| SourceRequest { dir, sampling }),
            threads: args.jobs.map_or(plain.threads, usize::from),
            ..plain
        })
    }

    /// Refuses what is plainly no container, saying what it is.
    pub(crate) fn check_directory(&self) -> Result<(), Failure> {
        let dir = &self.container;
        if !dir.is_dir() {
            let problem = if dir.exists() { "is no directory" } else { "does not exist" };
            let message = format!(
                "cannot verify {}: it {problem}; expected the directory of a container",
                dir.display()
            );
            return Err(Failure::data("no_container", message).with("file", dir.display().to_string()));
        }
        if dir.join(waste_common::container::MANIFEST).symlink_metadata().is_ok() {
            return Ok(());
        }
        let advice = if Checkpoint::is_checkpoint(dir) {
            "it is a checkpoint: waste-convert makes a container of it, and waste-verify CONTAINER --source compares \
             the two"
        } else if dir.join(waste_common::container::TRUNK).exists() || dir.join("codebooks.bin").exists() {
            "its conversion has not finished: run waste-convert again, it goes on where it stopped"
        } else {
            "expected the directory of a container"
        };
        Err(Failure::data(
            "no_container",
            format!("cannot verify {}: it has no manifest.json; {advice}", dir.display()),
        )
        .with("file", dir.display().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_evenly_spaced_and_never_more_than_there_are() {
        let of = |sampling: Sampling, count| sampling.of(count).collect::<Vec<_>>();
        assert_eq!(of(Sampling::Evenly(4), 896), [0, 224, 448, 672]);
        assert_eq!(of(Sampling::Evenly(4), 3), [0, 1, 2]);
        assert_eq!(of(Sampling::All, 3), [0, 1, 2]);
        assert_eq!(of(Sampling::Evenly(2), 65_536), [0, 32_768]);
    }
}
