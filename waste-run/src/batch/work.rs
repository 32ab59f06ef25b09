//! Answers on their way, several at a time: a chunk of one of the prompts that are still to be read, then a token of each.

use std::time::Instant;

use waste_engine::chat::Turn;
use waste_engine::sampler::Mask;
use waste_engine::tokenizer::Tokenizer;
use waste_engine::{Engine, EngineError, Lanes, Rota};

use super::item::Item;

/// Answers being written, each in a lane of the engine.
pub struct Work<'a> {
    engine: &'a Engine,
    tokenizer: &'a Tokenizer,
    mask: Option<&'a Mask>,
    lanes: Lanes,
    answers: Vec<Option<Answering<'a>>>,
    rota: Rota,
}

/// An answer, on its way or at its end.
pub struct Answering<'a> {
    /// What it answers.
    pub item: &'a Item,
    /// The answer.
    pub turn: Turn,
    /// When it was begun.
    pub began: Instant,
    /// Tokens of the prompt that are in.
    done: usize,
}

impl<'a> Work<'a> {
    /// As many as the engine writes at a time.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(
        engine: &'a Engine,
        tokenizer: &'a Tokenizer,
        mask: Option<&'a Mask>,
    ) -> Result<Work<'a>, EngineError> {
        let lanes = Lanes::new(engine)?;
        let answers = (0..lanes.len()).map(|_| None).collect();
        Ok(Work { engine, tokenizer, mask, lanes, answers, rota: Rota::default() })
    }

    /// A lane in which nothing is written.
    pub fn free(&self) -> Option<usize> {
        self.answers.iter().position(Option::is_none)
    }

    /// Whether nothing is written at all.
    pub fn idle(&self) -> bool {
        self.answers.iter().all(Option::is_none)
    }

    /// Begins an answer in a free lane.
    pub fn begin(&mut self, lane: usize, item: &'a Item, turn: Turn) {
        self.lanes.reset(lane);
        self.answers[lane] = Some(Answering { item, turn, began: Instant::now(), done: 0 });
    }

    /// Goes on with all of them; those that have ended come back.
    ///
    /// # Errors
    /// The engine fails, or was interrupted.
    pub fn round(&mut self) -> Result<Vec<Answering<'a>>, EngineError> {
        let Work { engine, tokenizer, mask, lanes, answers, rota } = self;
        let open = |answer: &Answering<'_>| answer.turn.finish().is_none();
        let prompts = places(answers, |answer| open(answer) && !answer.prompt_is_in());
        if let Some(lane) = rota.next(prompts.into_iter())
            && let Some(answer) = &mut answers[lane]
        {
            let (ids, done) = (&answer.item.ids, answer.done);
            let end = ids.len().min(done + engine.chunk());
            lanes.prefill(engine, lane, &ids[done..end], done..ids.len())?;
            answer.done = end;
        }
        let writing = places(answers, |answer| open(answer) && answer.prompt_is_in());
        let mut failed = None;
        lanes.next(engine, &writing, &mut |lane, logits| {
            let turn = &mut answers.get_mut(lane)?.as_mut()?.turn;
            if let Err(error) = logits.and_then(|logits| turn.next(logits, *mask, tokenizer)) {
                failed.get_or_insert(error);
            }
            turn.tokens().last().copied().filter(|_| turn.finish().is_none())
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let ended = answers.iter_mut().filter_map(|place| place.take_if(|answer| !open(answer)));
        Ok(ended.collect())
    }
}

impl Answering<'_> {
    fn prompt_is_in(&self) -> bool {
        self.done == self.item.ids.len()
    }
}

fn places<'a>(answers: &[Option<Answering<'a>>], which: impl Fn(&Answering<'a>) -> bool) -> Vec<usize> {
    let at = |place: &usize| answers[*place].as_ref().is_some_and(&which);
    (0..answers.len()).filter(at).collect()
}
