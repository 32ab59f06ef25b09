//! The engine as a [`Model`], with the states it keeps.

use std::ops::Range;

use waste_engine::saved::ImageSpan;
use waste_engine::vision::Vision;
use waste_engine::{Engine, EngineError, Lanes};

use super::{Gallery, Given, Model, Reads, Reuse, Write};
use crate::job::Job;

/// Called when the server ends, to leave what was learned.
pub type Farewell = Box<dyn FnMut(&Engine) + Send>;

/// An engine, and the lanes it computes in.
pub struct EngineModel {
    engine: Engine,
    lanes: Lanes,
    texts: Vec<Text>,
    reuse: Reuse,
    sight: Option<Sight>,
    farewell: Option<Farewell>,
}

/// What images are seen with.
pub struct Sight {
    tower: Vision,
    gallery: Gallery,
    /// Images that went through the tower.
    encoded: u64,
}

impl Sight {
    /// A tower, and what it saw lately.
    pub fn new(tower: Vision, gallery: Gallery) -> Sight {
        Sight { tower, gallery, encoded: 0 }
    }
}

#[derive(Default)]
struct Text {
    /// The tokens in the lane's state.
    tokens: Vec<u32>,
    /// Chosen, and not gone through the model yet.
    pending: Option<u32>,
}

impl EngineModel {
    /// A model on an engine.
    ///
    /// # Errors
    /// There is no memory for its lanes.
    pub fn new(
        engine: Engine,
        reuse: Reuse,
        sight: Option<Sight>,
        farewell: Option<Farewell>,
    ) -> Result<EngineModel, EngineError> {
        let lanes = Lanes::new(&engine)?;
        let texts = (0..lanes.len()).map(|_| Text::default()).collect();
        Ok(EngineModel { engine, lanes, texts, reuse, sight, farewell })
    }

    fn keep(&mut self, slot: usize, job: &Job) {
        let (tokens, logits) = (&self.texts[slot].tokens, self.lanes.logits(slot));
        self.reuse.keep(job.owner, tokens, &spans(job), logits, self.lanes.sequence(slot));
    }

    /// Queues the images that begin in a part of the prompt. True if the tower had to see one, which is as much of a turn
    /// as a chunk.
    fn see(
        &mut self,
        slot: usize,
        job: &mut Job,
        part: &Range<usize>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<bool, EngineError> {
        for seen in job.images.iter_mut().filter(|seen| part.contains(&seen.span.position)) {
            // Those that are queued are let go of.
            let Some(picture) = &seen.picture else { continue };
            let Some(Sight { tower, gallery, encoded }) = &mut self.sight else {
                return Err(EngineError::NoVision);
            };
            let sha256 = &seen.span.sha256;
            if let Some(rows) = gallery.find(job.owner, sha256) {
                self.lanes.queue_image(slot, rows);
                seen.picture = None;
                continue;
            }
            let rows = self.engine.encode_image(tower, &picture.image, wanted)?;
            *encoded += 1;
            self.lanes.queue_image(slot, &rows);
            gallery.keep(job.owner, sha256, rows);
            seen.picture = None;
            return Ok(true);
        }
        Ok(false)
    }
}

fn spans(job: &Job) -> Vec<ImageSpan> {
    job.images.iter().map(|seen| seen.span.clone()).collect()
}

impl Model for EngineModel {
    /// From the best state there is: the longest kept one, or none.
    fn begin(&mut self, slot: usize, job: &mut Job) -> Result<usize, EngineError> {
        EngineError::check_tokens(&job.ids, 0, self.engine.ctx(), self.engine.config().vocab)?;
        let text = &mut self.texts[slot];
        text.pending = None;
        text.tokens.clear();
        match self.reuse.find(job.owner, &job.ids, &spans(job)) {
            None => self.lanes.reset(slot),
            Some(kept) => {
                self.lanes.restore(slot, &kept.snapshot, &kept.logits)?;
                text.tokens.extend_from_slice(&kept.tokens);
            }
        }
        let reused = text.tokens.len();
        job.images.iter_mut().filter(|seen| seen.span.position < reused).for_each(|seen| seen.picture = None);
        Ok(reused)
    }

    fn prefill(
        &mut self,
        slot: usize,
        job: &mut Job,
        wanted: &dyn Fn() -> bool,
    ) -> Result<usize, EngineError> {
        let (at, of) = (self.texts[slot].tokens.len(), job.ids.len());
        let stops = [job.conversation.min(of), of];
        let stop = stops.into_iter().find(|stop| *stop > at).unwrap_or(of);
        let done = stop.min(at + self.engine.chunk());
        if self.see(slot, job, &(at..done), wanted)? {
            return Ok(at);
        }
        let chunk = &job.ids[at..done];
        self.lanes.prefill(&self.engine, slot, chunk, at..of)?;
        self.texts[slot].tokens.extend_from_slice(chunk);
        if done == stop {
            self.keep(slot, job);
        }
        Ok(done)
    }

    fn next(&mut self, slots: &[usize], write: &mut Write<'_>) -> Result<(), EngineError> {
        let texts = &mut self.texts;
        self.lanes.next(&self.engine, slots, &mut |slot, logits| {
            let text = &mut texts[slot];
            // The last one has gone through the model.
            text.tokens.extend(text.pending.take());
            text.pending = write(slot, logits.map(Given::Logits));
            text.pending
        })
    }

    fn done(&mut self, slot: usize, job: &Job) {
        self.keep(slot, job);
    }

    fn reads(&self) -> Reads {
        let stats = self.engine.read_stats();
        Reads {
            hits: stats.hits + stats.ahead_hits,
            misses: stats.misses,
            bytes: stats.bytes_read,
            images: self.sight.as_ref().map_or(0, |sight| sight.encoded),
            direct_io: self.engine.direct_io(),
        }
    }

    fn close(&mut self) {
        if let Some(farewell) = &mut self.farewell {
            farewell(&self.engine);
        }
    }
}
