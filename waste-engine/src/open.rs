//! From a directory to an engine within a memory plan: sizes, plan, reservation, and the options that follow.

use std::path::Path;

use waste_common::error::{Coded, Exit};
use waste_common::machine::{Machine, MachineError, Reservation, ReservationError};
use waste_common::plan::{self, MemoryPlan, ModelSizes, PlanError, PlanOptions};

use crate::error::EngineError;
use crate::model::open_source;
use crate::options::EngineOptions;
use crate::weights::Source;

/// Why a model could not be opened within a plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

impl OpenError {
    fn inner(&self) -> &dyn Coded {
        match self {
            OpenError::Engine(error) => error,
            OpenError::Plan(error) => error,
            OpenError::Machine(error) => error,
        }
    }
}

impl Coded for OpenError {
    fn exit(&self) -> Exit {
        self.inner().exit()
    }

    fn code(&self) -> &'static str {
        self.inner().code()
    }

    fn fields(&self) -> serde_json::Map<String, serde_json::Value> {
        self.inner().fields()
    }
}

/// A plan, and the RAM it was promised.
#[derive(Debug)]
pub struct Reserved {
    /// What the model is to be opened with.
    pub plan: MemoryPlan,
    /// Held as long as the engine lives, so that other engines know; `None` if they could not be told.
    pub reservation: Option<Reservation>,
    /// Why other engines could not be considered.
    pub unseen: Option<ReservationError>,
}

/// What a container or checkpoint directory needs.
///
/// # Errors
/// It is neither, or its configuration cannot be used.
pub fn sizes(dir: &Path) -> Result<ModelSizes, OpenError> {
    let (source, _) = open_source(dir)?;
    Ok(match source {
        Source::Container(container) => ModelSizes::of_container(&container)?,
        Source::Checkpoint(checkpoint) => ModelSizes::of_checkpoint_run_directly(checkpoint.config())?,
    })
}

/// Plans with what other engines leave, and takes it, in one step. `what` names this engine to others.
///
/// # Errors
/// The plan is refused.
pub fn reserve(
    sizes: &ModelSizes,
    options: &PlanOptions,
    machine: &Machine,
    what: &str,
) -> Result<Reserved, OpenError> {
    let mut made = None;
    let reservation = Reservation::plan(what, |others| {
        let reserved = others.iter().fold(0u64, |sum, other| sum.saturating_add(other.bytes));
        let unreserved = machine.usable_ram_bytes.saturating_add(machine.reserved_bytes);
        let machine = Machine {
            usable_ram_bytes: unreserved.saturating_sub(reserved),
            reserved_bytes: reserved,
            ..machine.clone()
        };
        let plan = plan::plan(sizes, options, &machine)?;
        Ok::<u64, PlanError>(made.insert(plan).taken_bytes())
    });
    match (reservation, made) {
        (Ok(Err(refusal)), _) => Err(refusal.into()),
        (Ok(Ok(reservation)), Some(plan)) => {
            Ok(Reserved { plan, reservation: Some(reservation), unseen: None })
        }
        // A reservation is made of a plan, so the error is what is left.
        (reservation, _) => {
            let plan = plan::plan(sizes, options, machine)?;
            Ok(Reserved { plan, reservation: None, unseen: reservation.err() })
        }
    }
}

impl EngineOptions {
    /// The same options with all that a plan decides.
    #[must_use]
    pub fn within(self, plan: &MemoryPlan) -> EngineOptions {
        EngineOptions {
            ctx: plan.ctx,
            kv: plan.kv,
            chunk: plan.chunk,
            parallel: plan.parallel,
            threads: plan.threads,
            cache_slots: usize::try_from(plan.cache_slots).unwrap_or(usize::MAX),
            ..self
        }
    }
}
