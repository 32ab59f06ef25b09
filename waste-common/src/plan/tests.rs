use super::*;

const GIB: u64 = 1 << 30;
const K3: &str = "kimi-k3";

fn sizes(name: &str) -> ModelSizes {
    ModelSizes::of_config(&known::config(name).unwrap()).unwrap()
}

fn options(ctx: usize) -> PlanOptions {
    PlanOptions { ctx, threads: 2, ..PlanOptions::default() }
}

fn on(ram: u64, ctx: usize) -> Result<MemoryPlan, PlanError> {
    plan(&sizes(K3), &options(ctx), &Machine::with_ram(ram))
}

/// Hundredths of a GiB, as printed.
fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / GIB as f64)
}

#[test]
fn the_checkpoint_of_k3_comes_out_to_the_byte() {
    assert_eq!(sizes(K3).checkpoint_bytes, Some(1_560_860_324_864));
}

#[test]
fn k3_has_the_published_sizes() {
    let k3 = sizes(K3);
    println!("{k3:?}");
    assert_eq!(gib(k3.trunk_bytes), "27.28");
    assert_eq!(k3.record_bytes, 12_406_784);
    assert_eq!((k3.moe_layers, k3.experts), (92, 92 * 896));
    let container = k3.container_bytes as f64 / GIB as f64;
    assert!((981.0..982.0).contains(&container), "{container}");
    let plan = on(64 * GIB, 4096).unwrap();
    println!("{plan:#?}");
    assert_eq!(gib(plan.working_set_bytes), "17.01");
    assert_eq!(plan.state_bytes >> 20, 659);
    for (ctx, floor) in [(4096, "28.30"), (32 << 10, "29.77"), (128 << 10, "34.83"), (1 << 20, "82.08")] {
        let plan = on(1024 * GIB, ctx).unwrap();
        assert_eq!(gib(plan.floor_bytes - plan.scratch_bytes), floor, "{ctx}");
    }
    assert!(plan.floor_bytes as f64 / GIB as f64 <= 28.7, "{}", gib(plan.floor_bytes));
    let f16 = PlanOptions { kv: KvType::F16, ..options(1 << 20) };
    let plan = super::plan(&k3, &f16, &Machine::with_ram(128 * GIB)).unwrap();
    println!("1M f16: {}", gib(plan.floor_bytes));
    assert!(plan.floor_bytes <= 57 * GIB, "{}", gib(plan.floor_bytes));
}
