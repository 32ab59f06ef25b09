//! The memory plan: what a model needs on a machine, computed before anything is loaded.
//!
//! [`plan`] is a pure function of the model's sizes, the options and the machine's capacity. The tools print it, and
//! the engine allocates what it says.

mod error;
pub mod known;
mod options;
pub mod scratch;
mod sizes;
#[cfg(test)]
mod tests;
mod words;

pub use error::PlanError;
pub use options::{Budget, KvType, PlanOptions, RamShare};
pub use sizes::{
    ModelSizes, VISION_DECODING, VISION_IMAGES, VISION_PATCHES, VISION_QUERIES, VISION_ROWS, usual_format,
    usual_quant, vision_activations, vision_patch_bytes, vision_row_bytes,
};

use serde::Serialize;

use crate::config::{Mixer, ModelConfig};
use crate::machine::Machine;
use scratch::{Scratch, ScratchOptions};

/// Working sets the automatic budget takes at most.
const WORKING_SETS: u64 = 3;

/// What a model needs on a machine. The order of the fields is that of the JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// `kimi-k3` or `kimi-linear`.
    pub arch: &'static str,
    /// Context length in tokens.
    pub ctx: usize,
    /// How latents are kept.
    pub kv: KvType,
    /// Whether images are accepted.
    pub vision: bool,
    /// Tokens of a prefill chunk.
    pub chunk: usize,
    /// Sequences that may decode together.
    pub parallel: usize,
    /// Compute threads.
    pub threads: usize,
    /// Trunk tensors of the text model that stay in memory.
    pub trunk_bytes: u64,
    /// KDA states, convolution tails and latent KV of all sequences.
    pub state_bytes: u64,
    /// Working buffers.
    pub scratch_bytes: u64,
    /// Two layers' worth of chosen experts.
    pub min_expert_cache_bytes: u64,
    /// Tower weights, decoding, activations and waiting embeddings of images; 0 without vision.
    pub vision_bytes: u64,
    /// The sum of the five above: the least the model runs with.
    pub floor_bytes: u64,
    /// One expert.
    pub record_bytes: u64,
    /// What a token reads when nothing is cached: the chosen experts of every MoE layer.
    pub working_set_bytes: u64,
    /// All experts.
    pub experts_bytes: u64,
    /// The container, made or to be made; 0 for a checkpoint that is run directly.
    pub container_bytes: u64,
    /// Tensor data of the checkpoint the container is made from; none for a container.
    pub checkpoint_bytes: Option<u64>,
    /// RAM built in.
    pub physical_ram_bytes: u64,
    /// RAM the process may count on.
    pub usable_ram_bytes: u64,
    /// RAM other engines have reserved, already taken off.
    pub reserved_bytes: u64,
    /// The share of the usable RAM that a budget should not exceed.
    pub cap_bytes: u64,
    /// What the run may take.
    pub budget_bytes: u64,
    /// The part of the budget that caches experts.
    pub expert_cache_bytes: u64,
    /// Records the cache holds: as many as go into it, but no more than there are experts (or the minimum cache
    /// holds).
    pub cache_slots: u64,
    /// Whole working sets of the budget above the floor.
    pub working_sets: u64,
    /// Whether the budget stays within the cap.
    pub fits: bool,
    /// The answer, in a sentence.
    pub verdict: String,
    /// What was chosen and why, in a line.
    pub explanation: String,
    /// What to know before running.
    pub warnings: Vec<String>,
    /// What changed nothing, for who wants to know more; no part of the JSON.
    #[serde(skip)]
    pub details: Vec<String>,
}

impl MemoryPlan {
    /// Whether the cache holds every expert of the model.
    pub fn holds_all_experts(&self) -> bool {
        self.expert_cache_bytes >= self.experts_bytes
    }

    /// The next lower budget that is worth trying where this one makes the machine page: a whole number of working sets
    /// above the floor; `None` at the floor.
    pub fn lower_budget(&self) -> Option<u64> {
        let above = self.taken_bytes().saturating_sub(self.floor_bytes);
        let sets = above.checked_sub(1)?.checked_div(self.working_set_bytes).unwrap_or(0);
        Some(self.floor_bytes + sets * self.working_set_bytes)
    }

    /// What a run really takes, in bytes: a budget may be more than all experts need.
    pub fn taken_bytes(&self) -> u64 {
        let cache = self.cache_slots.saturating_mul(self.record_bytes);
        let rest = self.floor_bytes.saturating_sub(self.min_expert_cache_bytes);
        self.budget_bytes.min(rest.saturating_add(cache))
    }
}

/// Plans a model on a machine.
///
/// # Errors
/// An option out of range (exit 2); an explicit budget below the floor, or a floor above the usable RAM unless
/// swapping is allowed (exit 4); sizes beyond 64 bits (exit 3).
pub fn plan(model: &ModelSizes, options: &PlanOptions, machine: &Machine) -> Result<MemoryPlan, PlanError> {
    check(options)?;
    let config = &model.config;
    let top_k = config.moe.as_ref().map_or(0, |moe| moe.top_k as u64);
    let vision = match (&config.vision, options.vision) {
        (_, false) => 0,
        (Some(vision), true) => sizes::vision_bytes(vision, model.tower_bytes, options.threads as u64),
        (None, true) => return Err(PlanError::NoVision),
    };
    let fit = |what, bytes| u64::try_from(bytes).map_err(|_| PlanError::TooLarge { what });
    let vision_bytes = fit("the vision tower", vision)?;
    let state_bytes = fit("the state", state_bytes(config, options))?;
    let scratch_bytes = fit("the scratch", scratch_bytes(model, options))?;
    let chosen = u128::from(top_k) * u128::from(model.record_bytes);
    let min_expert_cache_bytes = fit("the minimum expert cache", 2 * chosen)?;
    let working_set = fit("the working set", chosen * u128::from(model.moe_layers))?;
    let parts = [model.trunk_bytes, state_bytes, scratch_bytes, min_expert_cache_bytes, vision_bytes];
    let floor = fit("the floor", parts.iter().map(|&part| u128::from(part)).sum())?;

    let (usable, cap) = (machine.usable_ram_bytes, options.ram_share.of(machine.usable_ram_bytes));
    if let Budget::Bytes(budget) = options.budget
        && budget < floor
    {
        return Err(PlanError::BudgetBelowFloor { budget, floor });
    }
    if floor > usable && !options.allow_swap {
        let (physical, reserved) = (machine.physical_ram_bytes, machine.reserved_bytes);
        return Err(PlanError::NotEnoughRam { floor, usable, physical, reserved });
    }
    let budget = budget(options.budget, floor, working_set, model.experts_bytes, cap);

    let expert_cache_bytes = budget - floor + min_expert_cache_bytes;
    let slots = expert_cache_bytes.checked_div(model.record_bytes).unwrap_or(0);
    let mut plan = MemoryPlan {
        arch: config.arch,
        ctx: options.ctx,
        kv: options.kv,
        vision: options.vision,
        chunk: options.chunk,
        parallel: options.parallel,
        threads: options.threads,
        trunk_bytes: model.trunk_bytes,
        state_bytes,
        scratch_bytes,
        min_expert_cache_bytes,
        vision_bytes,
        floor_bytes: floor,
        record_bytes: model.record_bytes,
        working_set_bytes: working_set,
        experts_bytes: model.experts_bytes,
        container_bytes: model.container_bytes,
        checkpoint_bytes: model.checkpoint_bytes,
        physical_ram_bytes: machine.physical_ram_bytes,
        usable_ram_bytes: usable,
        reserved_bytes: machine.reserved_bytes,
        cap_bytes: cap,
        budget_bytes: budget,
        expert_cache_bytes,
        cache_slots: slots.min(model.experts.max(2 * top_k)),
        working_sets: (budget - floor).checked_div(working_set).unwrap_or(0),
        fits: budget <= cap,
        verdict: String::new(),
        explanation: String::new(),
        warnings: Vec::new(),
        details: Vec::new(),
    };
    words::explain(&mut plan, options, machine);
    Ok(plan)
}

fn check(options: &PlanOptions) -> Result<(), PlanError> {
    for (what, found, max) in [
        ("the context length", options.ctx, PlanOptions::CTX_MAX),
        ("the prefill chunk", options.chunk, PlanOptions::CHUNK_MAX),
        ("the number of sequences together", options.parallel, PlanOptions::PARALLEL_MAX),
        ("the number of threads", options.threads, PlanOptions::THREADS_MAX),
    ] {
        if found == 0 || found > max {
            return Err(PlanError::Option { what, found, expected: format!("1 to {max}") });
        }
    }
    Ok(())
}

/// The budget of a floor that may be run. Never below the floor; above the cap only if the floor is, or by order.
fn budget(choice: Budget, floor: u64, working_set: u64, experts: u64, cap: u64) -> u64 {
    let Some(room) = cap.checked_sub(floor) else {
        return match choice {
            Budget::Bytes(bytes) => bytes,
            _ => floor,
        };
    };
    let affordable = room.checked_div(working_set).unwrap_or(0);
    match choice {
        Budget::Bytes(bytes) => bytes,
        Budget::Auto => floor + affordable.min(WORKING_SETS) * working_set,
        Budget::Max if experts <= room => floor + experts,
        Budget::Max => floor + affordable * working_set,
    }
}

/// What the sequences carry from token to token.
fn state_bytes(config: &ModelConfig, options: &PlanOptions) -> u128 {
    let kda = &config.kda;
    let recurrent = (kda.width() * kda.dim) as u128;
    let tails = 3 * (kda.conv_kernel - 1) as u128 * kda.width() as u128;
    let latents = options.ctx as u128 * u128::from(options.kv.row_bytes(config.mla.cached()));
    let one = config.count(Mixer::Kda) as u128 * 4 * (recurrent + tails)
        + config.count(Mixer::Mla) as u128 * latents;
    options.parallel as u128 * one
}

/// The engine's buffers, the ids and visits of a chunk's experts, and what decoding of weights needs.
fn scratch_bytes(model: &ModelSizes, options: &PlanOptions) -> u128 {
    let PlanOptions { chunk, parallel, threads, .. } = *options;
    let sizes = ScratchOptions { chunk, parallel, threads, experts: model.storage };
    let top_k = model.config.moe.as_ref().map_or(0, |moe| moe.top_k);
    let (visits, lookups) = (chunk.max(parallel) * top_k, parallel * top_k);
    let buffers = Scratch::of(&model.config, &sizes).bytes();
    // An id, the visit, and where its expert's begin; and what a look-up needs.
    let lists = visits as u128 * (4 + 12 + 12) + lookups as u128 * 24;
    // Several sequences each keep the logits that their prompt ended with until their turn comes.
    let logits = if parallel > 1 { parallel as u128 * 4 * model.config.vocab as u128 } else { 0 };
    u128::from(buffers) + lists + logits + u128::from(model.staging_bytes)
}
