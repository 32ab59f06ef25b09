//! What all checks share: the container's manifest, the threads, and where findings go.

use std::path::Path;

use waste_common::cli::{Failure, Progress};
use waste_common::container::{Manifest, Source};
use waste_common::io::{Bypass, ReadFile};

use crate::crew::Crew;
use crate::report::{Findings, Halt, Problem};
use crate::resume::Resume;

pub(crate) struct Job<'a> {
    pub dir: &'a Path,
    pub manifest: &'a Manifest,
    pub quick: bool,
    pub bypass: Bypass,
    pub found: &'a Findings,
    pub crew: &'a Crew<'a>,
    pub progress: &'a Progress,
    pub resume: &'a Resume,
}

impl Job<'_> {
    /// Whether our checksums are there. Then what v0 leaves open (padding, flags) is fixed too.
    pub fn strict(&self) -> bool {
        self.manifest.integrity.is_some()
    }

    /// Whether all of a file was found sound before. Its bytes count as done then.
    pub fn known_sound(&self, source: &Source, file: &str) -> bool {
        let known = !self.quick && self.resume.is_sound(file);
        if known {
            self.progress.skip(source.bytes());
        }
        known
    }

    /// All of a file has been looked at: remembers it if nothing was wrong.
    pub fn looked_at(&self, file: &str) -> Result<(), Failure> {
        if self.quick || self.found.problems_of(file) > 0 { Ok(()) } else { self.resume.sound(file) }
    }

    /// Opens a file of the container; what is wrong with it becomes a problem made of `place`.
    pub fn open(&self, place: &Problem) -> Option<Source> {
        match Source::open(self.dir, &place.file) {
            Ok(source) => Some(source),
            Err(error) => {
                let Problem { kind, message, .. } = Problem::from_error(&place.file, &error);
                self.found.problem(Problem { kind, message, ..place.clone() });
                None
            }
        }
    }

    /// Opens a file for large reads, which leave the page cache as they find it.
    pub fn reader(&self, source: &Source, place: &Problem) -> Result<Option<ReadFile>, Failure> {
        let opened = ReadFile::open(source.path(), self.bypass).map_err(Halt::Read);
        self.settle(opened, place)
    }

    /// Turns a read error into a problem made of `place`.
    pub fn settle<T>(&self, result: Result<T, Halt>, place: &Problem) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(halt) => {
                self.found.problem(halt.into_problem(place.clone())?);
                Ok(None)
            }
        }
    }
}
