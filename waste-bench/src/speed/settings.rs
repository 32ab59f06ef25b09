//! The options of an engine that can be set, and compared.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use waste_common::io::Bypass;
use waste_common::machine::CpuList;
use waste_common::plan::{Budget, KvType, PlanOptions, RamShare};
use waste_engine::kernels::Kernels;
use waste_engine::{Arith, EngineError, EngineOptions};

use crate::plain;

/// How the engine is opened beside the budget: as waste-run does it.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// Share of the usable RAM that an automatic budget stays within
    #[arg(long, value_name = "N/D", default_value_t, help_heading = "Memory")]
    pub ram_share: RamShare,
    /// Run even if the floor is above the usable RAM
    #[arg(long, help_heading = "Memory")]
    pub allow_swap: bool,
    /// Context length: prompt and generation together
    #[arg(long, value_name = "TOKENS", default_value_t = PlanOptions::CTX, help_heading = "Memory")]
    pub ctx: usize,
    /// How the latent KV cache is kept
    #[arg(long, value_name = "TYPE", default_value_t, help_heading = "Memory")]
    pub kv: KvType,
    /// Compute threads [default: one a CPU]
    #[arg(long, env = "WASTE_THREADS", value_name = "N", help_heading = "Compute and I/O")]
    pub threads: Option<usize>,
    /// Bind the compute threads to these CPUs, such as 0-2,6-8 (Linux)
    #[arg(long, value_name = "LIST", help_heading = "Compute and I/O")]
    pub cpus: Option<CpuList>,
    /// The kernel set, `best`, or `plain`: exact arithmetic with look-ups as a compiler makes them [default: best]
    #[arg(long, env = "WASTE_KERNELS", value_name = "NAME", help_heading = "Compute and I/O")]
    pub kernels: Option<String>,
    /// The arithmetic of decoding: exact (f32 tables and products) or fast (whole numbers)
    #[arg(long, value_name = "NAME", default_value = Arith::default().name(), help_heading = "Compute and I/O")]
    pub arith: Arith,
    /// Tokens of a prefill chunk
    #[arg(long, value_name = "N", default_value_t = PlanOptions::CHUNK, help_heading = "Compute and I/O")]
    pub chunk: usize,
    /// Sequences that decode together
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Compute and I/O")]
    pub parallel: usize,
    /// Experts of the next layer read ahead; 0 for none
    #[arg(
        long,
        env = "WASTE_LOOKAHEAD",
        value_name = "N",
        default_value_t = 6,
        help_heading = "Compute and I/O"
    )]
    pub lookahead: usize,
    /// Reads in flight; 0 reads in the compute thread
    #[arg(
        long,
        env = "WASTE_IO_DEPTH",
        value_name = "N",
        default_value_t = 4,
        help_heading = "Compute and I/O"
    )]
    pub io_depth: usize,
    /// Check the checksum of every expert record as it is read
    #[arg(long, help_heading = "Compute and I/O")]
    pub verify: bool,
    /// Read experts through the page cache
    #[arg(long, help_heading = "Compute and I/O")]
    pub no_direct_io: bool,
}

/// Everything a run can be varied in.
#[derive(Clone)]
pub struct Settings {
    /// What the plan is made of.
    pub plan: PlanOptions,
    /// What the engine is opened with beside the plan.
    pub engine: EngineOptions,
    /// The kernels.
    pub kernels: &'static Kernels,
}

impl Settings {
    /// The settings of a command line.
    ///
    /// # Errors
    /// There is no such kernel set.
    pub fn of(args: &EngineArgs, budget: Budget) -> Result<Settings, EngineError> {
        let threads = args.threads.or(args.cpus.as_ref().map(|cpus| cpus.0.len()));
        let plan = PlanOptions {
            ctx: args.ctx,
            kv: args.kv,
            chunk: args.chunk,
            parallel: args.parallel,
            budget,
            ram_share: args.ram_share,
            allow_swap: args.allow_swap,
            ..PlanOptions::default()
        };
        let engine = EngineOptions {
            cpus: args.cpus.as_ref().map(|cpus| cpus.0.clone()),
            arith: args.arith,
            readers: args.io_depth,
            lookahead: args.lookahead,
            bypass: if args.no_direct_io { Bypass::Off } else { Bypass::On },
            verify: args.verify,
            ..EngineOptions::default()
        };
        let plan = PlanOptions { threads: threads.unwrap_or(plan.threads), ..plan };
        let mut settings = Settings { plan, engine, kernels: Kernels::detect() };
        if let Some(name) = args.kernels.as_deref().filter(|name| !name.is_empty()) {
            settings.take_kernels(name)?;
        }
        Ok(settings)
    }

    /// Kernels by name, or the `best`; the `plain` ones are of exact arithmetic.
    fn take_kernels(&mut self, name: &str) -> Result<(), EngineError> {
        match name {
            plain::NAME => (self.kernels, self.engine.arith) = (plain::kernels(), Arith::Exact),
            "best" => self.kernels = Kernels::detect(),
            _ => self.kernels = Kernels::named(name)?,
        }
        Ok(())
    }

    /// For the record.
    pub fn record(&self) -> SettingsRecord {
        SettingsRecord {
            budget: self.plan.budget.to_string(),
            ctx: self.plan.ctx,
            kv: self.plan.kv,
            threads: self.plan.threads,
            kernels: self.kernels.name,
            arith: self.engine.arith.name(),
            chunk: self.plan.chunk,
            parallel: self.plan.parallel,
            lookahead: self.engine.lookahead,
            io_depth: self.engine.readers,
            direct_io: self.engine.bypass == Bypass::On,
            verify: self.engine.verify,
        }
    }
}

/// Settings as a record keeps them.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct SettingsRecord {
    pub budget: String,
    pub ctx: usize,
    pub kv: KvType,
    pub threads: usize,
    pub kernels: &'static str,
    pub arith: &'static str,
    pub chunk: usize,
    pub parallel: usize,
    pub lookahead: usize,
    pub io_depth: usize,
    pub direct_io: bool,
    pub verify: bool,
}

/// What can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Budget,
    Threads,
    Kernels,
    Arith,
    Chunk,
    Parallel,
    Lookahead,
    IoDepth,
    DirectIo,
    Verify,
}

const KEYS: [(&str, Key); 10] = [
    ("budget", Key::Budget),
    ("threads", Key::Threads),
    ("kernels", Key::Kernels),
    ("arith", Key::Arith),
    ("chunk", Key::Chunk),
    ("parallel", Key::Parallel),
    ("lookahead", Key::Lookahead),
    ("io-depth", Key::IoDepth),
    ("direct-io", Key::DirectIo),
    ("verify", Key::Verify),
];

/// `lookahead=0,6`: an option and the values it is measured with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compare {
    key: Key,
    name: &'static str,
    values: Vec<String>,
}

impl FromStr for Compare {
    type Err = String;

    fn from_str(text: &str) -> Result<Compare, String> {
        let names: Vec<&str> = KEYS.iter().map(|(name, _)| *name).collect();
        let wrong = || format!("expected OPTION=VALUE,VALUE… with one of {}", names.join(", "));
        let (name, values) = text.split_once('=').ok_or_else(wrong)?;
        let &(name, key) = KEYS.iter().find(|(known, _)| *known == name).ok_or_else(wrong)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        let compare = Compare { key, name, values };
        // Values are tried on now, so that a wrong one is wrong usage.
        let any = Settings {
            plan: PlanOptions::default(),
            engine: EngineOptions::default(),
            kernels: Kernels::detect(),
        };
        if compare.values.len() < 2 {
            return Err(format!("{name} needs at least two values to compare"));
        }
        compare.arms(&any)?;
        Ok(compare)
    }
}

impl Compare {
    /// The arms: a label and settings each.
    ///
    /// # Errors
    /// A value does not suit its option.
    pub fn arms(&self, base: &Settings) -> Result<Vec<(String, Settings)>, String> {
        let arm = |value: &String| {
            let mut settings = base.clone();
            self.set(&mut settings, value)?;
            Ok((format!("{}={value}", self.name), settings))
        };
        self.values.iter().map(arm).collect()
    }

    fn set(&self, settings: &mut Settings, value: &str) -> Result<(), String> {
        let wrong = |why: &dyn fmt::Display| format!("{}={value}: {why}", self.name);
        let number = || value.parse::<usize>().map_err(|error| wrong(&error));
        let switch = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(wrong(&"expected on or off")),
        };
        match self.key {
            Key::Budget => settings.plan.budget = value.parse().map_err(|error: String| wrong(&error))?,
            Key::Threads => settings.plan.threads = number()?,
            Key::Kernels => settings.take_kernels(value).map_err(|error| wrong(&error))?,
            Key::Arith => settings.engine.arith = value.parse().map_err(|error: String| wrong(&error))?,
            Key::Chunk => settings.plan.chunk = number()?,
            Key::Parallel => settings.plan.parallel = number()?,
            Key::Lookahead => settings.engine.lookahead = number()?,
            Key::IoDepth => settings.engine.readers = number()?,
            Key::DirectIo => {
                settings.engine.bypass = if switch()? { Bypass::On } else { Bypass::Off };
            }
            Key::Verify => settings.engine.verify = switch()?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_read_strictly() {
        let compare: Compare = "lookahead=0,6".parse().unwrap();
        let base = Settings {
            plan: PlanOptions::default(),
            engine: EngineOptions::default(),
            kernels: Kernels::detect(),
        };
        let arms = compare.arms(&base).unwrap();
        assert_eq!(arms[0].0, "lookahead=0");
        assert_eq!((arms[0].1.engine.lookahead, arms[1].1.engine.lookahead), (0, 6));
        for good in
            ["budget=4GiB,max", "threads=1,2", "kernels=plain,best", "arith=exact,fast", "chunk=64,256"]
        {
            good.parse::<Compare>().unwrap();
        }
        for good in ["parallel=1,4", "io-depth=1,8", "direct-io=on,off", "verify=off,on"] {
            good.parse::<Compare>().unwrap();
        }
        for wrong in
            ["", "lookahead", "lookahead=1", "lookahead=1,x", "what=1,2", "direct-io=1,0", "budget=1Q,2"]
        {
            assert!(wrong.parse::<Compare>().is_err(), "{wrong}");
        }
    }
}
