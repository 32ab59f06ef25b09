//! A plan in words: the verdict, the explanation, the warnings.

use super::{Budget, MemoryPlan, PlanOptions, budget};
use crate::machine::Machine;
use crate::size::ByteSize;

/// Fills in what a plan says.
pub(super) fn explain(plan: &mut MemoryPlan, options: &PlanOptions, machine: &Machine) {
    plan.verdict = verdict(plan);
    plan.explanation = explanation(plan, options);
    plan.warnings = warnings(plan, options);
    if plan.reserved_bytes > 0 {
        let reserved = format!(
            "running engines have reserved {}, which is not counted as usable RAM",
            ByteSize(plan.reserved_bytes)
        );
        if reservations_matter(plan, options, machine) {
            plan.warnings.insert(0, reserved);
        } else {
            plan.details.push(reserved);
        }
    }
}

/// Whether the plan would be another without the reservations of running engines.
fn reservations_matter(plan: &MemoryPlan, options: &PlanOptions, machine: &Machine) -> bool {
    let cap = options.ram_share.of(machine.unreserved_bytes());
    let (floor, set) = (plan.floor_bytes, plan.working_set_bytes);
    let alone = budget(options.budget, floor, set, plan.experts_bytes, cap);
    (alone, alone <= cap) != (plan.budget_bytes, plan.fits)
}

fn verdict(plan: &MemoryPlan) -> String {
    let (budget, cap) = (ByteSize(plan.budget_bytes), ByteSize(plan.cap_bytes));
    let usable = ByteSize(plan.usable_ram_bytes);
    if !plan.fits {
        let why = if plan.floor_bytes > plan.usable_ram_bytes {
            format!("its floor alone is {}", ByteSize(plan.floor_bytes))
        } else if plan.floor_bytes > plan.cap_bytes {
            format!(
                "its floor, {}, goes into the RAM but leaves too little for the system",
                ByteSize(plan.floor_bytes)
            )
        } else {
            format!("the budget given is {budget}")
        };
        return format!("Does not fit into {cap} of {usable} of RAM: {why}.");
    }
    let cached = if plan.experts_bytes == 0 {
        "the whole model in memory".to_owned()
    } else if plan.holds_all_experts() {
        format!("the whole model in memory, all {} of experts", ByteSize(plan.experts_bytes))
    } else {
        match plan.working_sets {
            0 => format!("the smallest expert cache, {}", ByteSize(plan.expert_cache_bytes)),
            _ => format!("{} of experts cached", ByteSize(plan.expert_cache_bytes)),
        }
    };
    format!("Fits: {budget} of {usable} of RAM, {cached}.")
}

fn explanation(plan: &MemoryPlan, options: &PlanOptions) -> String {
    let (floor, set) = (ByteSize(plan.floor_bytes), ByteSize(plan.working_set_bytes));
    let cap = format!(
        "the cap of {} ({} of {} usable RAM)",
        ByteSize(plan.cap_bytes),
        options.ram_share,
        ByteSize(plan.usable_ram_bytes)
    );
    let sets = |n: u64| match n {
        0 => format!("the floor of {floor} and no working set of {set}"),
        1 => format!("the floor of {floor} and 1 working set of {set}"),
        n => format!("the floor of {floor} and {n} working sets of {set}"),
    };
    let why = match options.budget {
        Budget::Bytes(_) => format!("as given; the floor is {floor}"),
        _ if plan.floor_bytes > plan.cap_bytes => format!("the floor, which is above {cap}"),
        _ if plan.working_set_bytes == 0 => format!("the floor; the model has no experts to cache; {cap}"),
        Budget::Max if plan.budget_bytes - plan.floor_bytes == plan.experts_bytes => {
            format!("the floor of {floor} and all {} of experts, within {cap}", ByteSize(plan.experts_bytes))
        }
        Budget::Auto if plan.working_sets == super::WORKING_SETS => {
            format!("{}, within {cap}", sets(plan.working_sets))
        }
        _ => format!("{}; one more would pass {cap}", sets(plan.working_sets)),
    };
    let mut line = format!("budget {} ({}): {why}", ByteSize(plan.budget_bytes), name(options.budget));
    if plan.experts_bytes > 0 && !plan.holds_all_experts() {
        let all = u128::from(plan.floor_bytes) + u128::from(plan.experts_bytes);
        if all <= u128::from(plan.cap_bytes) {
            line += &format!("; --budget max would hold all experts here, with {}", size(all));
        } else {
            let ram = options.ram_share.needed_for(all);
            line += &format!("; --budget max would hold all experts with {} of RAM", size(ram));
        }
    }
    line
}

fn name(budget: Budget) -> &'static str {
    match budget {
        Budget::Auto => "auto",
        Budget::Max => "max",
        Budget::Bytes(_) => "given",
    }
}

/// A size that may be beyond 64 bits, of a machine nobody has.
fn size(bytes: u128) -> String {
    u64::try_from(bytes).map_or_else(|_| "over 16 EiB".to_owned(), |bytes| ByteSize(bytes).to_string())
}

fn warnings(plan: &MemoryPlan, options: &PlanOptions) -> Vec<String> {
    let mut warnings = Vec::new();
    let (usable, cap) = (ByteSize(plan.usable_ram_bytes), ByteSize(plan.cap_bytes));
    if plan.floor_bytes > plan.usable_ram_bytes {
        warnings.push(format!(
            "the floor of {} is above the usable RAM of {usable}: the machine will swap and every token will be slow",
            ByteSize(plan.floor_bytes)
        ));
    } else if plan.floor_bytes > plan.cap_bytes {
        warnings.push(format!(
            "the floor of {} is above {cap}, {} of the usable RAM: the machine will page",
            ByteSize(plan.floor_bytes),
            options.ram_share
        ));
    } else if let Budget::Bytes(given) = options.budget
        && given > plan.cap_bytes
    {
        let recommended = budget(
            Budget::Auto,
            plan.floor_bytes,
            plan.working_set_bytes,
            plan.experts_bytes,
            plan.cap_bytes,
        );
        warnings.push(format!(
            "the budget of {} is above {cap}, {} of the usable RAM: the machine may page, and then a cached expert costs \
             a disk read all the same; the recommended budget is {} ({recommended} bytes)",
            ByteSize(given),
            options.ram_share,
            ByteSize(recommended)
        ));
    }
    warnings
}
