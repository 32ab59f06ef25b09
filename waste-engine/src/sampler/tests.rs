use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn options(edit: impl FnOnce(&mut SamplerOptions)) -> SamplerOptions {
    let mut options = SamplerOptions { temperature: 1.0, seed: Some(5), ..Default::default() };
    edit(&mut options);
    options
}

fn sampler(edit: impl FnOnce(&mut SamplerOptions)) -> Sampler {
    Sampler::new(options(edit)).unwrap()
}

#[test]
fn survivors_probabilities_and_picks_of_the_vectors() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/tokenizer/sampler.json");
    let vectors: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    let mut picks = 0;
    for case in cases {
        let name = &case["name"];
        let logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
        let params = &case["params"];
        let number = |key: &str, default| params.get(key).map_or(default, |value| value.as_f64().unwrap());
        let mut sampler = sampler(|options| {
            options.temperature = number("T", 1.0);
            options.top_k = number("k", 0.0) as u32;
            options.top_p = number("tp", 1.0);
            options.min_p = number("mp", 0.0);
            if let Some(bias) = params.get("bias") {
                options.logit_bias = serde_json::from_value(bias.clone()).unwrap();
            }
        });
        let expect = &case["expect"];
        if let Some(greedy) = expect.get("greedy") {
            assert_eq!(sampler.sample(&logits, None), Ok(greedy.as_u64().unwrap() as u32), "{name}");
            picks += 1;
            continue;
        }
        let kept: Vec<u32> = serde_json::from_value(expect["kept"].clone()).unwrap();
        let probs: Vec<f64> = serde_json::from_value(expect["probs"].clone()).unwrap();
        let survivors = sampler.survivors(&logits, None, usize::MAX).unwrap();
        assert_eq!(survivors.iter().map(|entry| entry.0).collect::<Vec<_>>(), kept, "{name}");
        for ((_, found), expected) in survivors.iter().zip(probs) {
            assert!((found - expected).abs() < 1e-6, "{name}: {found} for {expected}");
        }
        for pick in expect["picks"].as_array().unwrap() {
            let found = sampler.pick(&logits, None, pick[0].as_f64().unwrap()).unwrap();
            assert_eq!(u64::from(found), pick[1].as_u64().unwrap(), "{name} at {}", pick[0]);
            picks += 1;
        }
    }
    assert!(picks > 100, "{picks}");
}

/// The definition of the sampler with everything sorted.
fn naive(options: &SamplerOptions, logits: &[f32], mask: &Mask, u: f64) -> u32 {
    let adjusted = |id: u32| f64::from(logits[id as usize]) + options.logit_bias.get(&id).unwrap_or(&0.0);
    let ids = (0..logits.len() as u32).filter(|id| mask.allows(*id));
    let mut list: Vec<(f64, u32)> = ids.map(|id| (adjusted(id), id)).collect();
    let highest = list.iter().map(|entry| entry.0).fold(f64::NEG_INFINITY, f64::max);
    list.iter_mut().for_each(|entry| entry.0 = ((entry.0 - highest) / options.temperature).exp());
    list.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if options.top_k > 0 {
        list.truncate(options.top_k as usize);
    }
    let cumulative = |list: &[(f64, u32)]| -> Vec<f64> {
        let total: f64 = list.iter().map(|entry| entry.0).sum();
        let sums = list.iter().scan(0.0, |sum, entry| {
            *sum += entry.0;
            Some(*sum / total)
        });
        sums.collect()
    };
    if options.top_p < 1.0 {
        let last = cumulative(&list).iter().position(|sum| *sum >= options.top_p);
        list.truncate(last.map_or(list.len(), |last| last + 1));
    }
    list.retain(|entry| entry.0 >= options.min_p);
    let drawn = cumulative(&list).iter().position(|sum| *sum > u);
    list[drawn.unwrap_or(list.len() - 1)].1
}

proptest! {
    #[test]
    fn selection_agrees_with_sorting(
        // Many ties. The fractions are odd, so that no sum falls on a boundary where rounding decides.
        steps in proptest::collection::vec(0u8..8, 1..300),
        banned in proptest::collection::vec(1u32..300, 0..20),
        temperature in 0.3..2.0,
        top_k in 0u32..40,
        top_p in prop_oneof![Just(1.0), (0u32..64).prop_map(|part| (f64::from(part) + 0.314159) / 64.0)],
        min_p in prop_oneof![Just(0.0), 0.0..0.3],
        u in (0u32..1000).prop_map(|part| (f64::from(part) + 0.271828) / 1000.0),
    ) {
        let logits: Vec<f32> = steps.iter().map(|step| -f32::from(*step)).collect();
        let mask = Mask::without(logits.len(), &banned);
        let mut sampler = sampler(|options| {
            *options = SamplerOptions { temperature, top_k, top_p, min_p, ..options.clone() };
            options.logit_bias = [(0, 1.5)].into();
        });
        let found = sampler.pick(&logits, Some(&mask), u).unwrap();
        prop_assert_eq!(found, naive(sampler.options(), &logits, &mask, u));
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids_and_still_uses_a_number() {
    let logits = [1.0, 3.0, 3.0, f32::NEG_INFINITY];
    let mut greedy = sampler(|options| {
        options.temperature = 1e-7;
        options.top_k = 1;
    });
    assert_eq!(greedy.sample(&logits, None), Ok(1));
    assert_eq!(greedy.sample(&logits, Some(&Mask::without(4, &[1]))), Ok(2));
    assert_eq!(greedy.state().draws, 2);
    assert_eq!(greedy.survivors(&logits, None, 9), Ok(vec![(1, 1.0)]));
    greedy.skip();
    assert_eq!(greedy.state().draws, 3);
    // The fourth token of a sampled run with the same seed uses the same number whatever came before.
    let mut sampled = sampler(|_| ());
    (0..3).for_each(|_| sampled.skip());
    let expected = sampled.pick(&[0.0; 100], None, uniform(5, 3));
    assert_eq!(sampled.sample(&[0.0; 100], None), expected);
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_a_drawn_one_can_be_read() {
    let logits: Vec<f32> = (0..1000).map(|id| ((id * 37 % 101) as f32) / 20.0).collect();
    let run = |seed| {
        let mut sampler = sampler(|options| options.seed = seed);
        let tokens: Vec<u32> = (0..50).map(|_| sampler.sample(&logits, None).unwrap()).collect();
        (sampler.seed(), tokens)
    };
    assert_eq!(run(Some(1)), run(Some(1)));
    assert_ne!(run(Some(1)).1, run(Some(2)).1);
    let (seed, tokens) = run(None);
    assert_eq!(run(Some(seed)).1, tokens);
    assert_ne!(run(None).0, seed);
}

/// What a seed means must never change.
#[test]
fn a_seed_means_these_tokens_for_ever() {
    let mut sampler = sampler(|options| options.seed = Some(0x1234_5678_9abc_def0));
    let tokens: Vec<u32> = (0..12).map(|_| sampler.sample(&[0.0; 1000], None).unwrap()).collect();
    let expected: Vec<u32> =
        (0..12).map(|draw| (uniform(0x1234_5678_9abc_def0, draw) * 1000.0) as u32).collect();
    assert_eq!(tokens, expected);
    assert_eq!(tokens, SEED_TOKENS);
}

const SEED_TOKENS: [u32; 12] = [675, 480, 302, 704, 776, 361, 319, 919, 46, 922, 89, 856];

#[test]
fn penalties_count_what_was_generated() {
    let logits = [2.0, 1.75, 0.0];
    let mut sampler = sampler(|options| {
        options.temperature = 0.0;
        options.presence_penalty = 0.125;
        options.frequency_penalty = 0.0625;
    });
    // Token 0 loses 0.125 + 0.0625 n: 1.8125 after one, 1.75 (a tie, the lower id) after two, less after three.
    for _ in 0..3 {
        assert_eq!(sampler.sample(&logits, None), Ok(0));
        sampler.accept(0);
    }
    assert_eq!(sampler.sample(&logits, None), Ok(1));
    sampler.accept(1);
    sampler.accept(77);
    assert_eq!(sampler.state().counts, [(0, 3), (1, 1), (77, 1)]);
    assert_eq!(sampler.sample(&logits, None), Ok(0));
}

#[test]
fn a_saved_state_goes_on_where_it_was() {
    let logits: Vec<f32> = (0..200).map(|id| (id % 17) as f32 / 5.0).collect();
    let options = options(|options| options.frequency_penalty = 0.5);
    let step = |sampler: &mut Sampler| {
        let token = sampler.sample(&logits, None).unwrap();
        sampler.accept(token);
        token
    };
    let mut first = Sampler::new(options.clone()).unwrap();
    for _ in 0..20 {
        step(&mut first);
    }
    let saved = serde_json::to_string(first.state()).unwrap();
    let other_seed = SamplerOptions { seed: Some(99), ..options.clone() };
    let mut second = Sampler::resume(other_seed, serde_json::from_str(&saved).unwrap()).unwrap();
    for _ in 0..30 {
        assert_eq!(step(&mut first), step(&mut second));
    }
    for counts in [vec![(3, 1), (3, 1)], vec![(4, 1), (3, 1)], vec![(3, 0)]] {
        let state = SamplerState { seed: 0, draws: 0, counts };
        assert!(matches!(Sampler::resume(options.clone(), state), Err(SamplerError::State { .. })));
    }
}

#[test]
fn bad_logits_and_masks_are_errors_and_use_no_number() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(|options| options.temperature = temperature);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let error = sampler.sample(&[0.0, bad, 1.0], None).unwrap_err();
            assert!(matches!(error, SamplerError::Logit { id: 1, .. }), "{error}");
        }
        let nothing = |logits| Err(SamplerError::NothingAllowed { logits });
        assert_eq!(sampler.sample(&[], None), nothing(0));
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY; 3], None), nothing(3));
        assert_eq!(sampler.sample(&[1.0; 3], Some(&Mask::none(3))), nothing(3));
        let short = sampler.sample(&[1.0; 3], Some(&Mask::all(2)));
        assert_eq!(short, Err(SamplerError::MaskLength { mask: 2, logits: 3 }));
        assert_eq!(sampler.state().draws, 0);
        // Extreme but finite logits are no problem; what has no weight is never drawn.
        for u in [0.0, 0.5, 1.0 - f64::EPSILON / 2.0] {
            assert_eq!(sampler.pick(&[f32::MIN, f32::MAX, f32::NEG_INFINITY], None, u), Ok(1));
        }
    }
    let mut sampler = sampler(|options| options.logit_bias = [(3, 1.0)].into());
    assert_eq!(sampler.sample(&[1.0; 3], None), Err(SamplerError::BiasId { id: 3, vocab: 3 }));
}

#[test]
fn options_outside_their_range_are_refused() {
    type Edit = fn(&mut SamplerOptions, f64);
    let edits: [(Edit, f64, f64); 6] = [
        (|options, value| options.temperature = value, 0.0, 2.0),
        (|options, value| options.top_p = value, 0.0, 1.0),
        (|options, value| options.min_p = value, 0.0, 1.0),
        (|options, value| options.presence_penalty = value, -2.0, 2.0),
        (|options, value| options.frequency_penalty = value, -2.0, 2.0),
        (|options, value| options.logit_bias = [(7, value)].into(), -100.0, 100.0),
    ];
    for (edit, low, high) in edits {
        for good in [low, high] {
            assert!(Sampler::new(options(|options| edit(options, good))).is_ok());
        }
        for bad in [low - 1e-9, high + 1e-9, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(Sampler::new(options(|options| edit(options, bad))).is_err(), "{bad}");
        }
    }
    // top_p 0 and min_p 1 keep one token; several only where they are equal in probability.
    let mut narrow = sampler(|options| options.top_p = 0.0);
    assert_eq!(narrow.survivors(&[1.0, 2.0, 2.0], None, 9), Ok(vec![(1, 1.0)]));
    let mut narrow = sampler(|options| options.min_p = 1.0);
    assert_eq!(narrow.survivors(&[1.0, 2.0, 2.0], None, 9), Ok(vec![(1, 0.5), (2, 0.5)]));
    assert_eq!(narrow.survivors(&[1.0, 2.0, 2.0], None, 1), Ok(vec![(1, 0.5)]));
}

#[test]
fn the_scratch_memory_is_allocated_once() {
    let logits: Vec<f32> = (0..5000).map(|id| (id % 977) as f32 / 100.0).collect();
    let mut sampler = sampler(|options| options.top_p = 0.9);
    sampler.sample(&logits, None).unwrap();
    let before = (sampler.candidates.as_ptr(), sampler.candidates.capacity());
    for _ in 0..20 {
        sampler.sample(&logits, None).unwrap();
    }
    assert_eq!((sampler.candidates.as_ptr(), sampler.candidates.capacity()), before);
}

/// `cargo test --release -p waste-engine sampler::tests::speed -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn speed() {
    let logits: Vec<f32> = (0..163_840u64)
        .map(|id| (-(uniform(1, 2 * id).max(1e-12)).ln()).sqrt() as f32 * 4.0 * uniform(1, 2 * id + 1) as f32)
        .collect();
    let mask = Mask::without(logits.len(), &[1, 2, 3]);
    for (name, temperature, top_k, top_p) in [
        ("greedy", 0.0, 0, 1.0),
        ("plain", 1.0, 0, 1.0),
        ("top_k 40", 1.0, 40, 1.0),
        ("top_p 0.95", 1.0, 0, 0.95),
    ] {
        let mut sampler =
            sampler(|options| *options = SamplerOptions { temperature, top_k, top_p, ..options.clone() });
        let begin = std::time::Instant::now();
        for _ in 0..50 {
            sampler.sample(&logits, Some(&mask)).unwrap();
        }
        println!("{name}: {:?} a token", begin.elapsed() / 50);
    }
}
