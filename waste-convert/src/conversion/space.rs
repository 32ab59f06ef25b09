//! What a conversion takes on disk.

use std::path::Path;

use waste_common::container::codebook_bytes;
use waste_common::io::filesystem;

use super::Conversion;
use crate::convert::Work;
use crate::error::ConvertError;
use crate::layer::LayerJob;
use crate::supply::Reclaim;
use crate::{state, trunk};

impl Conversion<'_> {
    /// Bytes of the finished container, a little more for the work files of the merge.
    pub fn bytes(&self) -> Result<u64, ConvertError> {
        let trunk = trunk::trunk_bytes(self.source, &self.request.options)?;
        let sidecars: usize = self.sidecars.iter().map(|(_, content)| content.len()).sum();
        let manifest = (1 << 16) + 1024 * (self.source.trunk.len() + self.jobs.len()) as u64;
        // Codebooks are there twice while they are merged.
        let layers: u64 = self.jobs.iter().map(|job| self.bank_bytes(job) + 2 * self.book_bytes()).sum();
        Ok(trunk + layers + sidecars as u64 + 2 * manifest)
    }

    fn bank_bytes(&self, job: &LayerJob) -> u64 {
        job.experts as u64 * job.geometry.record_bytes() as u64
    }

    /// Bytes of a layer's codebooks.
    fn book_bytes(&self) -> u64 {
        u64::from(self.quant.codebooks_per_layer()) * codebook_bytes(self.quant.entries)
    }

    /// Bytes still to be written by what was asked for.
    pub fn needed(&self) -> Result<u64, ConvertError> {
        if let Work::Layers(Some(layers)) = &self.request.work {
            let owed = self.jobs.iter().filter(|job| layers.contains(&job.layer));
            let owed = owed.filter(|job| !state::looks_finished(self.dir(), job));
            return Ok(owed.map(|job| self.bank_bytes(job) + self.book_bytes()).sum());
        }
        let written = if self.dir().is_dir() { state::written_files(self.dir())? } else { Vec::new() };
        Ok(self.bytes()?.saturating_sub(state::bytes_of(self.dir(), written)))
    }

    /// Compares the bytes still to be written with what is free.
    pub fn check_space(&self, free: Option<u64>) -> Result<(), ConvertError> {
        // Where room is made on the way, it is looked at layer by layer.
        if self.request.reclaim == Reclaim::On {
            return Ok(());
        }
        let needed = self.needed()?;
        match free {
            Some(free) if free < needed => {
                Err(ConvertError::NoSpace { dir: self.dir().to_owned(), needed, free })
            }
            _ => Ok(()),
        }
    }
}

/// Free bytes where `dir` is or will be.
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
    let absolute = std::path::absolute(dir).ok()?;
    let existing = absolute.ancestors().find(|path| path.exists())?;
    filesystem(existing).ok()?.free_bytes
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::source::Source;
    use crate::{Options, Request};
    use waste_common::error::{Coded, Exit};

    #[test]
    fn what_does_not_fit_the_disk_is_refused_and_what_is_there_counts() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny-linear/ckpt");
        let source = Source::open(&checkpoint).unwrap();
        let request = Request {
            checkpoint,
            container: dir.path().join("not yet"),
            options: Options::default(),
            importance: None,
            work: Work::All,
            threads: 1,
            jobs: 1,
            follow: false,
            reclaim: Reclaim::Off,
            reserve: 0,
            program: None,
            force: false,
        };
        let conversion = Conversion::new(&request, &source).unwrap();
        let bytes = conversion.bytes().unwrap();
        // The finished container has 6,162,165; the rest is work files.
        assert!((6_162_165..7_000_000).contains(&bytes), "{bytes}");
        conversion.check_space(Some(bytes)).unwrap();
        conversion.check_space(None).unwrap();
        let error = conversion.check_space(Some(bytes - 1)).unwrap_err();
        assert_eq!((error.exit(), error.code()), (Exit::Space, "disk_full"));
        assert_eq!(error.fields()["shortfall_bytes"], 1);
        fs::create_dir(&request.container).unwrap();
        fs::write(request.container.join("experts-L1.bin"), [0; 1000]).unwrap();
        conversion.check_space(Some(bytes - 1000)).unwrap();

        // Of some layers no more than they take.
        let first = conversion.jobs[0].layer;
        let some = Request { work: Work::Layers(Some([first].into())), ..request };
        let conversion = Conversion::new(&some, &source).unwrap();
        let needed = conversion.needed().unwrap();
        let bank = conversion.bank_bytes(&conversion.jobs[0]);
        assert!(needed > bank && needed < bytes / conversion.jobs.len() as u64, "{needed} of {bytes}");
        conversion.check_space(Some(needed)).unwrap();
        assert!(conversion.check_space(Some(needed - 1)).is_err());
    }
}
