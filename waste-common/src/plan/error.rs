//! Why there is no plan.

use serde_json::{Map, Value};

use crate::config::ConfigError;
use crate::error::{Coded, Exit};
use crate::quant::QuantError;
use crate::size::ByteSize;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error(
        "the budget of {} ({budget} bytes) is {} short of the floor, {} ({floor} bytes): below it the model cannot \
         run without swapping; give at least that, or shorten --ctx; waste-plan shows what the floor is made of",
        ByteSize(*budget), ByteSize(floor - budget), ByteSize(*floor)
    )]
    BudgetBelowFloor { budget: u64, floor: u64 },
    #[error(
        "not enough RAM: the model needs at least {} and {} can be used{} ({} short): a run would swap; shorten \
         --ctx, take a machine with more RAM, or insist with --allow-swap (with it, waste-plan shows what \
         the floor is made of)",
        ByteSize(*floor), ByteSize(*usable), reserved_note(*reserved), ByteSize(floor - usable)
    )]
    NotEnoughRam { floor: u64, usable: u64, physical: u64, reserved: u64 },
    #[error("{what} is {found}; expected {expected}")]
    Option { what: &'static str, found: usize, expected: String },
    #[error("this model has no vision tower; plan it without vision")]
    NoVision,
    #[error("{what} of this model would exceed 2^64 bytes")]
    TooLarge { what: &'static str },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the experts' records cannot be laid out")]
    Records(#[from] QuantError),
}

fn reserved_note(reserved: u64) -> String {
    match reserved {
        0 => String::new(),
        bytes => format!(", {} being reserved by running engines", ByteSize(bytes)),
    }
}

impl Coded for PlanError {
    fn exit(&self) -> Exit {
        match self {
            PlanError::BudgetBelowFloor { .. } | PlanError::NotEnoughRam { .. } => Exit::Space,
            PlanError::Option { .. } | PlanError::NoVision => Exit::Usage,
            PlanError::TooLarge { .. } | PlanError::Records(_) => Exit::Data,
            PlanError::Config(error) => error.exit(),
        }
    }

    fn code(&self) -> &'static str {
        match self {
            PlanError::BudgetBelowFloor { .. } => "budget_below_floor",
            PlanError::NotEnoughRam { .. } => "not_enough_ram",
            PlanError::Option { .. } => "invalid_option",
            PlanError::NoVision => "no_vision",
            PlanError::TooLarge { .. } => "model_too_large",
            PlanError::Records(_) => "invalid_config",
            PlanError::Config(error) => error.code(),
        }
    }

    fn fields(&self) -> Map<String, Value> {
        let pairs: &[(&str, u64)] = match self {
            PlanError::BudgetBelowFloor { budget, floor } => {
                &[("budget_bytes", *budget), ("floor_bytes", *floor), ("shortfall_bytes", floor - budget)]
            }
            PlanError::NotEnoughRam { floor, usable, physical, reserved } => &[
                ("floor_bytes", *floor),
                ("usable_ram_bytes", *usable),
                ("physical_ram_bytes", *physical),
                ("reserved_bytes", *reserved),
                ("shortfall_bytes", floor - usable),
            ],
            _ => &[],
        };
        pairs.iter().map(|(key, value)| ((*key).to_owned(), Value::from(*value))).collect()
    }
}
