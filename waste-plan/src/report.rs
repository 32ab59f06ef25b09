//! The plan, for people and for the next tool.

use std::fmt;
use std::path::PathBuf;

use serde_json::{Map, Value};
use waste_common::cli::ByteSize;
use waste_common::cli::chain::Kind;
use waste_common::plan::MemoryPlan;

use crate::disk::{Estimate, Space};

/// Everything the tool found. Displays as a table and the verdict.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was looked at.
    pub kind: Kind,
    /// Where it is, or its name.
    pub path: PathBuf,
    /// The plan.
    pub plan: MemoryPlan,
    /// The disk's space, if asked for.
    pub space: Option<Space>,
    /// The disk's speed, if given.
    pub estimate: Option<Estimate>,
}

impl Report {
    /// Whether the RAM suffices, and the disk as far as it was asked for.
    pub fn fits(&self) -> bool {
        let space = self.space.as_ref().and_then(|space| space.disk_fits);
        self.plan.fits && space != Some(false)
    }
}

impl Report {
    /// The JSON: the key names the kind, so that the next tool takes it.
    ///
    /// # Errors
    /// None that is not a bug.
    pub fn object(&self) -> Result<Map<String, Value>, serde_json::Error> {
        let mut object = Map::new();
        object.insert(self.kind.key().to_owned(), self.path.display().to_string().into());
        let parts = [
            serde_json::to_value(&self.plan)?,
            serde_json::to_value(&self.space)?,
            serde_json::to_value(&self.estimate)?,
        ];
        for part in parts {
            if let Value::Object(part) = part {
                object.extend(part);
            }
        }
        Ok(object)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = &self.plan;
        let vision = if plan.vision { ", with images" } else { "" };
        writeln!(f, "{} ({} {})", plan.arch, self.kind.key(), self.path.display())?;
        let together = match plan.parallel {
            1 => String::new(),
            n => format!(" each for {n} sequences together"),
        };
        writeln!(
            f,
            "{} tokens of {} context{together}{vision}, {} threads, prefill in chunks of {}\n",
            plan.ctx, plan.kv, plan.threads, plan.chunk
        )?;
        let mut size = |name: &str, bytes: u64, note: &str| {
            let line = format!("  {name:<24}{:>14}  {note}", ByteSize(bytes));
            writeln!(f, "{}", line.trim_end())
        };
        size("trunk", plan.trunk_bytes, "")?;
        size("state", plan.state_bytes, "")?;
        size("scratch", plan.scratch_bytes, "")?;
        size("minimum expert cache", plan.min_expert_cache_bytes, "one layer's experts, twice")?;
        if plan.vision {
            size("vision", plan.vision_bytes, "")?;
        }
        size("floor", plan.floor_bytes, "the least it runs with")?;
        size("working set", plan.working_set_bytes, "what a token reads when nothing is cached")?;
        size("all experts", plan.experts_bytes, "")?;
        size("container on disk", plan.container_bytes, "")?;
        if let Some(bytes) = plan.checkpoint_bytes {
            size("checkpoint on disk", bytes, "needed for the conversion only")?;
        }
        size("usable RAM", plan.usable_ram_bytes, "")?;
        size("cap", plan.cap_bytes, "")?;
        size("budget", plan.budget_bytes, "")?;
        let slots = format!("{} experts of {}", plan.cache_slots, ByteSize(plan.record_bytes));
        size("expert cache", plan.expert_cache_bytes, &slots)?;
        if let Some(space) = &self.space {
            self.write_space(f, space)?;
        }
        if let Some(estimate) = &self.estimate {
            write_estimate(f, estimate)?;
        }
        writeln!(f, "\n{}\n{}", plan.explanation, plan.verdict)?;
        match &self.space {
            Some(Space { disk_fits: Some(false), dest, .. }) => {
                writeln!(f, "Does not fit onto the disk of {dest}.")
            }
            _ => Ok(()),
        }
    }
}

impl Report {
    fn write_space(&self, f: &mut fmt::Formatter<'_>, space: &Space) -> fmt::Result {
        let free = space.disk_free_bytes.map_or("unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
        writeln!(f, "\n  {:<24}{:>14}", "disk needed", ByteSize(space.disk_needed_bytes))?;
        writeln!(f, "  {:<24}{free:>14}  {} at {}", "disk free", space.disk_kind, space.dest)
    }
}

fn write_estimate(f: &mut fmt::Formatter<'_>, estimate: &Estimate) -> fmt::Result {
    let note = format!("{:.1} % of the experts found in the cache", 100.0 * estimate.hit_rate);
    writeln!(f, "\n  {:<24}{:>14}  {note}", "read for a token", ByteSize(estimate.bytes_per_token))?;
    let seconds = format!("{:.3} s", estimate.disk_seconds_per_token);
    writeln!(f, "  {:<24}{seconds:>14}  at {} GB/s", "disk time for a token", estimate.disk_gbps)?;
    let rate = match estimate.tokens_per_second_max {
        Some(rate) => format!("{rate:.2} tok/s"),
        None => "no bound".to_owned(),
    };
    writeln!(f, "  {:<24}{rate:>14}", "the disk allows")
}
