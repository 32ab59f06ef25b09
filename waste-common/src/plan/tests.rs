use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::{Coded, Exit};

const GIB: u64 = 1 << 30;
const K3: &str = "kimi-k3";
const LINEAR: &str = "kimi-linear-48b";

fn sizes(name: &str) -> ModelSizes {
    ModelSizes::of_config(&known::config(name).unwrap()).unwrap()
}

/// Two threads, so that figures do not depend on the machine that tests.
fn options(ctx: usize) -> PlanOptions {
    PlanOptions { ctx, threads: 2, kv: KvType::F32, ..PlanOptions::default() }
}

fn with_budget(budget: Budget) -> PlanOptions {
    PlanOptions { budget, ..options(4096) }
}

fn on(name: &str, ram: u64, options: &PlanOptions) -> Result<MemoryPlan, PlanError> {
    plan(&sizes(name), options, &Machine::with_ram(ram))
}

/// As printed: two decimals.
fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / GIB as f64)
}

/// Where a budget makes the machine page, the next lower one is a working set less, down to the floor.
#[test]
fn a_lower_budget_is_whole_working_sets_above_the_floor() {
    let plan = |budget| on(LINEAR, 64 * GIB, &with_budget(budget)).unwrap();
    let auto = plan(Budget::Auto);
    let (floor, set) = (auto.floor_bytes, auto.working_set_bytes);
    assert_eq!((auto.budget_bytes, auto.lower_budget()), (floor + 3 * set, Some(floor + 2 * set)));
    let lower = |bytes| plan(Budget::Bytes(bytes)).lower_budget();
    assert_eq!(lower(floor + set), Some(floor));
    assert_eq!(lower(floor + set / 2), Some(floor));
    assert_eq!(lower(floor), None);
    // What is beyond all experts is not taken in the first place.
    let lower = lower(60 * GIB).unwrap();
    assert!(lower < auto.experts_bytes + floor && lower + set >= auto.experts_bytes, "{lower}");
}

#[test]
fn the_checkpoint_of_k3_comes_out_to_the_byte() {
    assert_eq!(sizes(K3).checkpoint_bytes, Some(1_560_860_324_864));
}

#[test]
fn known_models_are_the_published_configurations() {
    for (name, file) in [(K3, "kimi-k3.config.json"), (LINEAR, "kimi-linear-48b.config.json")] {
        let path = format!("{}/../tests/configs/{file}", env!("CARGO_MANIFEST_DIR"));
        let published: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(known::config(name), Some(published));
    }
    assert_eq!(known::names().collect::<Vec<_>>(), [K3, LINEAR]);
    assert_eq!(known::config("kimi-k4"), None);
}

#[test]
fn k3_has_the_published_sizes() {
    let k3 = sizes(K3);
    assert_eq!(gib(k3.trunk_bytes), "27.28");
    assert_eq!(k3.record_bytes, 12_406_784);
    assert_eq!((k3.moe_layers, k3.experts), (92, 92 * 896));
    assert_eq!(k3.container_bytes / GIB, 981);
    let plan = on(K3, 64 * GIB, &options(4096)).unwrap();
    assert_eq!(gib(plan.working_set_bytes), "17.01");
    assert_eq!(plan.working_set_bytes, 16 * 92 * 12_406_784);
    assert_eq!(plan.state_bytes >> 20, 659);
    for (ctx, floor) in [(4096, "28.30"), (32 << 10, "29.77"), (128 << 10, "34.83"), (1 << 20, "82.08")] {
        let plan = on(K3, 1024 * GIB, &options(ctx)).unwrap();
        assert_eq!(gib(plan.floor_bytes - plan.scratch_bytes), floor, "{ctx}");
    }
}

/// The latent cache is the whole point: one row of 576 numbers a token and layer, not one per head.
#[test]
fn the_state_has_its_three_parts() {
    let mib = |kv, ctx| {
        let options = PlanOptions { kv, ..options(ctx) };
        on(K3, 1024 * GIB, &options).unwrap().state_bytes as f64 / f64::from(1 << 20)
    };
    let latent = mib(KvType::F32, 4096) - mib(KvType::F32, 2048);
    assert_eq!(latent, 108.0);
    assert_eq!(mib(KvType::F16, 4096), mib(KvType::F32, 2048));
    // 576 bytes and five scales.
    assert_eq!(KvType::Q8.row_bytes(576), 586);
    let constant = mib(KvType::F32, 4096) - 216.0;
    assert_eq!(constant.round(), 414.0 + 29.0);
}

#[test]
fn sequences_that_decode_together_have_states_and_tables_of_their_own() {
    let of = |parallel| on(LINEAR, 64 * GIB, &PlanOptions { parallel, ..options(4096) }).unwrap();
    let (one, four) = (of(1), of(4));
    assert_eq!(four.state_bytes, 4 * one.state_bytes);
    // Gate, up, and eight times down, of three stages of 256 entries.
    let tables = 4 * 3 * 256 * (2 * 2304 / 8 + 8 * 1024 / 8);
    let more = four.scratch_bytes - one.scratch_bytes;
    let logits = 4 * 4 * 163_840;
    assert!((3 * tables + logits..3 * tables + logits + (1 << 20)).contains(&more), "{more}");
    assert_eq!(four.floor_bytes - one.floor_bytes, 3 * one.state_bytes + more);
    for parallel in [0, PlanOptions::PARALLEL_MAX + 1] {
        let error = on(LINEAR, 64 * GIB, &PlanOptions { parallel, ..options(4096) }).unwrap_err();
        assert_eq!(error.exit(), Exit::Usage);
    }
}

#[test]
fn the_goals_for_the_floor_of_k3_are_met() {
    let at_4k = on(K3, 64 * GIB, &options(4096)).unwrap();
    assert!(at_4k.floor_bytes as f64 <= 28.7 * GIB as f64, "{}", gib(at_4k.floor_bytes));
    let f16 = PlanOptions { kv: KvType::F16, ..options(1 << 20) };
    let at_1m = on(K3, 128 * GIB, &f16).unwrap();
    assert!(at_1m.floor_bytes <= 57 * GIB, "{}", gib(at_1m.floor_bytes));
}

#[test]
fn the_automatic_budget_takes_whole_working_sets() {
    for (ram, sets) in [(64, 1), (96, 3), (80, 2), (128, 3), (1024, 3)] {
        let plan = on(K3, ram * GIB, &options(4096)).unwrap();
        assert_eq!(plan.working_sets, sets, "{ram}");
        assert_eq!(plan.budget_bytes, plan.floor_bytes + sets * plan.working_set_bytes);
        assert_eq!(plan.expert_cache_bytes, sets * plan.working_set_bytes + plan.min_expert_cache_bytes);
        assert_eq!(plan.cache_slots, plan.expert_cache_bytes / plan.record_bytes);
        assert!(plan.fits && plan.warnings.is_empty() && plan.verdict.starts_with("Fits"), "{plan:?}");
    }
    let plan = on(K3, 64 * GIB, &options(4096)).unwrap();
    assert_eq!((gib(plan.cap_bytes), gib(plan.expert_cache_bytes)), ("56.00".into(), "17.38".into()));
    // Another share of the RAM is another cap: 48 GiB hold one working set, 32 none.
    for (share, sets) in [("3/4", 1), ("1/2", 0)] {
        let options = PlanOptions { ram_share: share.parse().unwrap(), ..options(4096) };
        assert_eq!(on(K3, 64 * GIB, &options).unwrap().working_sets, sets, "{share}");
    }
}

#[test]
fn k3_pages_on_32_gib_and_is_refused_on_16() {
    let plan = on(K3, 32 * GIB, &options(4096)).unwrap();
    assert_eq!((plan.budget_bytes, plan.working_sets, plan.fits), (plan.floor_bytes, 0, false));
    assert!(plan.warnings[0].contains("will page"), "{:?}", plan.warnings);
    for budget in [Budget::Auto, Budget::Max, Budget::Bytes(40 * GIB)] {
        let error = on(K3, 16 * GIB, &with_budget(budget)).unwrap_err();
        assert_eq!((error.exit(), error.code()), (Exit::Space, "not_enough_ram"));
        let fields = error.fields();
        let field = |key: &str| fields[key].as_u64().unwrap();
        assert_eq!(field("shortfall_bytes"), field("floor_bytes") - 16 * GIB);
        let swap = PlanOptions { allow_swap: true, ..with_budget(budget) };
        let plan = on(K3, 16 * GIB, &swap).unwrap();
        assert!(!plan.fits && plan.warnings[0].contains("swap"), "{plan:?}");
    }
}

#[test]
fn an_explicit_budget_is_used_as_given_or_refused() {
    let auto = on(K3, 64 * GIB, &options(4096)).unwrap();
    let plan = on(K3, 64 * GIB, &with_budget(Budget::Bytes(40 * GIB))).unwrap();
    assert_eq!((plan.budget_bytes, plan.fits, plan.working_sets), (40 * GIB, true, 0));
    let plan = on(K3, 64 * GIB, &with_budget(Budget::Bytes(60 * GIB))).unwrap();
    assert_eq!((plan.budget_bytes, plan.fits), (60 * GIB, false));
    let recommended = auto.budget_bytes.to_string();
    assert!(plan.warnings[0].contains(&recommended), "{:?}", plan.warnings);
    let floor = auto.floor_bytes;
    assert!(on(K3, 64 * GIB, &with_budget(Budget::Bytes(floor))).unwrap().fits);
    let error = on(K3, 64 * GIB, &with_budget(Budget::Bytes(floor - 1))).unwrap_err();
    assert_eq!((error.exit(), error.code()), (Exit::Space, "budget_below_floor"));
    assert_eq!(error.fields()["shortfall_bytes"], json!(1));
    assert_eq!(error.fields()["floor_bytes"], json!(floor));
    assert!(error.to_string().contains("waste-plan"), "{error}");
}

#[test]
fn max_takes_all_experts_or_whole_working_sets() {
    let linear = on(LINEAR, 24 * GIB, &with_budget(Budget::Max)).unwrap();
    assert_eq!(linear.budget_bytes, linear.floor_bytes + linear.experts_bytes);
    assert!(linear.holds_all_experts() && linear.fits, "{linear:?}");
    assert_eq!(linear.cache_slots, 26 * 256);
    assert!(linear.verdict.contains("whole model"), "{}", linear.verdict);
    let k3 = on(K3, 256 * GIB, &with_budget(Budget::Max)).unwrap();
    assert_eq!(k3.budget_bytes, k3.floor_bytes + k3.working_sets * k3.working_set_bytes);
    assert!(k3.cap_bytes - k3.budget_bytes < k3.working_set_bytes && k3.working_sets == 11);
    // The line says when max would hold everything: here, or from how much RAM.
    let here = on(LINEAR, 24 * GIB, &options(4096)).unwrap();
    assert!(here.explanation.contains("--budget max would hold all experts here"), "{}", here.explanation);
    let elsewhere = on(K3, 64 * GIB, &options(4096)).unwrap();
    let needed = RamShare::default()
        .needed_for(u128::from(elsewhere.floor_bytes) + u128::from(elsewhere.experts_bytes));
    let enough = on(K3, needed as u64, &with_budget(Budget::Max)).unwrap();
    assert!(enough.holds_all_experts());
    assert!(!on(K3, needed as u64 - 8, &with_budget(Budget::Max)).unwrap().holds_all_experts());
}

#[test]
fn kimi_linear_has_the_published_sizes() {
    let linear = sizes(LINEAR);
    assert_eq!(linear.record_bytes, 2_666_496);
    assert_eq!(format!("{:.1}", linear.container_bytes as f64 / 1e9), "19.2");
    assert_eq!(format!("{:.1}", linear.container_bytes as f64 / GIB as f64), "17.9");
    let mib = |bytes: u64| (bytes as f64 / f64::from(1 << 20)).round();
    assert_eq!(mib(linear.trunk_bytes), 988.0);
    let plan = on(LINEAR, 8 * GIB, &options(4096)).unwrap();
    assert_eq!((mib(plan.state_bytes), mib(plan.min_expert_cache_bytes)), (106.0, 41.0));
    assert!(plan.floor_bytes as f64 <= 1.28 * GIB as f64, "{}", gib(plan.floor_bytes));
    let error = on(LINEAR, 8 * GIB, &PlanOptions { vision: true, ..options(4096) }).unwrap_err();
    assert_eq!(error.code(), "no_vision");
}

#[test]
fn vision_is_counted_when_it_is_on() {
    let off = on(K3, 64 * GIB, &options(4096)).unwrap();
    let on = on(K3, 64 * GIB, &PlanOptions { vision: true, ..options(4096) }).unwrap();
    assert_eq!((off.vision_bytes, off.trunk_bytes), (0, on.trunk_bytes));
    assert!(on.vision_bytes > sizes(K3).tower_bytes && on.vision_bytes < GIB, "{}", on.vision_bytes);
    assert_eq!(on.floor_bytes, off.floor_bytes + on.vision_bytes);
}

#[test]
fn a_checkpoint_run_directly_is_planned_in_f32() {
    let config = known::config(LINEAR).unwrap();
    let direct = ModelSizes::of_checkpoint_run_directly(&config).unwrap();
    let (all, _) = crate::tensors::parameters(&direct.config);
    let experts = 26 * 256 * 3 * 2304 * 1024;
    assert_eq!(direct.trunk_bytes, 4 * (all - experts - 163_840 * 2304));
    assert_eq!(direct.record_bytes, 3 * 4 * 2304 * 1024);
    assert_eq!(direct.container_bytes, 0);
    let plan = plan(&direct, &options(4096), &Machine::with_ram(64 * GIB)).unwrap();
    assert!(plan.scratch_bytes > direct.staging_bytes && direct.staging_bytes >= 4 * 163_840 * 2304);
}

#[test]
fn tied_embeddings_stay_in_memory() {
    let mut config = known::config(LINEAR).unwrap();
    let untied = sizes(LINEAR);
    config["tie_word_embeddings"] = json!(true);
    let tied = ModelSizes::of_config(&config).unwrap();
    assert_eq!(tied.trunk_bytes, untied.trunk_bytes);
    assert!(tied.container_bytes < untied.container_bytes);
}

#[test]
fn a_model_without_experts_has_a_floor_and_no_cache() {
    let mut config = known::config(LINEAR).unwrap();
    config["num_experts"] = json!(null);
    let dense = ModelSizes::of_config(&config).unwrap();
    for budget in [Budget::Auto, Budget::Max] {
        let plan = plan(&dense, &with_budget(budget), &Machine::with_ram(64 * GIB)).unwrap();
        assert_eq!((plan.budget_bytes, plan.cache_slots, plan.record_bytes), (plan.floor_bytes, 0, 0));
        assert!(plan.fits);
    }
}

/// The slots are what the engine allocates: no more than there are experts.
#[test]
fn a_cache_has_no_more_slots_than_there_are_experts() {
    let plan = on(LINEAR, 64 * GIB, &with_budget(Budget::Bytes(60 * GIB))).unwrap();
    assert_eq!(plan.cache_slots, 26 * 256);
}

#[test]
fn options_out_of_range_are_refused() {
    let refused = |change: fn(&mut PlanOptions)| {
        let mut options = options(4096);
        change(&mut options);
        on(K3, 64 * GIB, &options).unwrap_err().code()
    };
    assert_eq!(refused(|o| o.ctx = 0), "invalid_option");
    assert_eq!(refused(|o| o.ctx = usize::MAX), "invalid_option");
    assert_eq!(refused(|o| o.chunk = 1025), "invalid_option");
    assert_eq!(refused(|o| o.threads = 0), "invalid_option");
    for bad in ["", "1", "0/8", "9/8", "7/0", "-1/2", "7/8/9", "0.75"] {
        assert!(bad.parse::<RamShare>().is_err(), "{bad}");
    }
    assert_eq!("3/4".parse::<RamShare>().unwrap().to_string(), "3/4");
    assert_eq!(RamShare::default().of(15), 15 - 15 / 8);
    assert_eq!("46G".parse(), Ok(Budget::Bytes(46 * GIB)));
    assert!("lots".parse::<Budget>().is_err() && "bf16".parse::<KvType>().is_err());
}

#[test]
fn reservations_are_said() {
    let mut machine = Machine::with_ram(128 * GIB);
    machine.usable_ram_bytes = 80 * GIB;
    machine.reserved_bytes = 48 * GIB;
    let plan = plan(&sizes(K3), &options(4096), &machine).unwrap();
    assert_eq!((plan.working_sets, plan.usable_ram_bytes), (2, 80 * GIB));
    assert!(plan.warnings[0].contains("48.00 GiB"), "{:?}", plan.warnings);
}

/// A warning that changes nothing is noise: beside a small engine there is often room for all the same.
#[test]
fn reservations_that_change_nothing_are_a_detail() {
    let mut machine = Machine::with_ram(256 * GIB);
    machine.usable_ram_bytes -= GIB;
    machine.reserved_bytes = GIB;
    let beside = plan(&sizes(K3), &options(4096), &machine).unwrap();
    assert!(beside.warnings.is_empty() && beside.details[0].contains("1.00 GiB"), "{beside:?}");
    // A given budget stays what it is, but may not fit any more.
    let given = with_budget(Budget::Bytes(200 * GIB));
    assert!(plan(&sizes(K3), &given, &machine).unwrap().warnings.is_empty());
    machine.usable_ram_bytes = 200 * GIB;
    machine.reserved_bytes = 56 * GIB;
    let crowded = plan(&sizes(K3), &given, &machine).unwrap();
    assert!(crowded.warnings[0].contains("56.00 GiB") && !crowded.fits, "{:?}", crowded.warnings);
}

/// The bug behind it: an engine with a boundless budget reserved more RAM than there is, and others found none.
#[test]
fn a_run_takes_no_more_than_its_experts_need() {
    let linear = sizes(LINEAR);
    let boundless = on(LINEAR, 64 * GIB, &with_budget(Budget::Bytes(u64::MAX))).unwrap();
    let rest = boundless.floor_bytes - boundless.min_expert_cache_bytes;
    assert_eq!(boundless.budget_bytes, u64::MAX);
    assert_eq!(boundless.taken_bytes(), rest + linear.experts * linear.record_bytes);
    let auto = on(LINEAR, 16 * GIB, &options(4096)).unwrap();
    let slack = auto.budget_bytes - auto.taken_bytes();
    assert!(slack < auto.record_bytes, "{slack}");
}

#[test]
fn the_json_has_the_keys_in_order() {
    let plan = on(K3, 64 * GIB, &options(4096)).unwrap();
    let value = serde_json::to_value(&plan).unwrap();
    assert_eq!((&value["kv"], &value["fits"], &value["arch"]), (&json!("f32"), &json!(true), &json!(K3)));
    assert_eq!(value.as_object().unwrap().keys().next().unwrap(), "arch");
}

fn budgets() -> impl Strategy<Value = Budget> {
    prop_oneof![Just(Budget::Auto), Just(Budget::Max), any::<u64>().prop_map(Budget::Bytes)]
}

fn some_options() -> impl Strategy<Value = PlanOptions> {
    (
        (1usize..=PlanOptions::CTX_MAX, 0usize..3, 1usize..=1024, 1usize..=16, 1usize..=1024),
        (any::<bool>(), budgets(), (1u32.., any::<u32>()), any::<bool>()),
    )
        .prop_map(
            |((ctx, kv, chunk, parallel, threads), (vision, budget, (denominator, part), allow_swap))| {
                let ram_share = RamShare::new(part % denominator + 1, denominator).unwrap();
                let kv = KvType::ALL[kv];
                PlanOptions { ctx, kv, chunk, parallel, threads, vision, budget, ram_share, allow_swap }
            },
        )
}

/// Sizes of all magnitudes.
fn some_bytes() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0u32..64).prop_map(|(bytes, shift)| bytes >> shift)
}

proptest! {
    #[test]
    fn a_plan_keeps_its_promises(options in some_options(), ram in some_bytes(), linear: bool) {
        let model = sizes(if linear { LINEAR } else { K3 });
        if let Ok(plan) = plan(&model, &options, &Machine::with_ram(ram)) {
            prop_assert!(plan.budget_bytes >= plan.floor_bytes);
            prop_assert!(plan.cap_bytes <= ram);
            if !matches!(options.budget, Budget::Bytes(_)) {
                prop_assert!(plan.budget_bytes <= plan.cap_bytes || plan.budget_bytes == plan.floor_bytes);
            }
            prop_assert_eq!(plan.fits, plan.budget_bytes <= plan.cap_bytes);
            prop_assert!(plan.cache_slots * plan.record_bytes <= plan.expert_cache_bytes);
            prop_assert!(plan.cache_slots >= 2 * 8);
            prop_assert_eq!(plan.fits, plan.verdict.starts_with("Fits"));
        }
    }

    #[test]
    fn more_ram_never_gives_a_smaller_budget(ram in some_bytes(), more in some_bytes(), max: bool) {
        let options = with_budget(if max { Budget::Max } else { Budget::Auto });
        let budget = |ram| on(K3, ram, &options).map_or(0, |plan| plan.budget_bytes);
        prop_assert!(budget(ram) <= budget(ram.saturating_add(more)));
    }

    #[test]
    fn nothing_overflows(
        options in some_options(),
        sizes_of in prop::collection::vec(some_bytes(), 7),
        ram in some_bytes(),
    ) {
        let model = ModelSizes {
            trunk_bytes: sizes_of[0],
            tower_bytes: sizes_of[1],
            record_bytes: sizes_of[2],
            moe_layers: sizes_of[3],
            experts: sizes_of[4],
            experts_bytes: sizes_of[5],
            staging_bytes: sizes_of[6],
            ..sizes(K3)
        };
        if let Ok(plan) = plan(&model, &options, &Machine::with_ram(ram)) {
            prop_assert!(plan.budget_bytes >= plan.floor_bytes);
            prop_assert!(u128::from(plan.cache_slots) * u128::from(plan.record_bytes) <= plan.expert_cache_bytes.into());
        }
    }
}
