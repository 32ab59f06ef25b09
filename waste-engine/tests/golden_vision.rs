//! Images against the golden vectors: preprocessing to the bit, the tower to rounding; and images that are damaged.
#![cfg(feature = "vision")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{Golden, max_abs, path, relative_l2};
use waste_common::container::{Container, TrunkFmt};
use waste_common::error::{Coded, Exit};
use waste_engine::Arith;
use waste_engine::compute::Compute;
use waste_engine::kernels::Kernels;
use waste_engine::matrix::Matrix;
use waste_engine::vision::decode::{decode, dimensions};
use waste_engine::vision::image::{padded_rgb, patches, plan};
use waste_engine::vision::position::{Rotation, add_positions, angle};
use waste_engine::vision::{Limits, Plan, Processing, Stage, Vision, VisionConfig};
use waste_engine::{EngineError, open_source};

const PATCH: usize = 14;

fn compute(threads: usize) -> Compute {
    Compute::new(Kernels::detect(), Arith::Exact, threads, None, 0).unwrap()
}

fn component(name: &str) -> Vec<u8> {
    std::fs::read(path(&format!("golden/components/{name}"))).unwrap()
}

fn plan_of(json: &serde_json::Value) -> Plan {
    let n = |key: &str| json[key].as_u64().unwrap() as usize;
    let plan = Plan {
        width: n("new_w"),
        height: n("new_h"),
        pad_right: n("pad_w"),
        pad_bottom: n("pad_h"),
        grid_height: n("grid_h"),
        grid_width: n("grid_w"),
    };
    assert_eq!(plan.tokens(), n("tokens"));
    plan
}

#[test]
fn plans_are_exact() {
    let json: serde_json::Value = serde_json::from_slice(&component("image.json")).unwrap();
    for (key, limit) in [("plans", 65_536), ("plans_1024", 1024)] {
        let plans = json[key].as_array().unwrap();
        assert!(plans.len() >= 5);
        for expected in plans {
            let n = |key: &str| expected[key].as_u64().unwrap() as usize;
            assert_eq!(plan(n("w"), n("h"), limit, 512, PATCH), plan_of(expected), "{key} {expected}");
        }
    }
    assert_eq!(plan(896, 896, 1024, 512, PATCH).tokens(), 256);
    // 316 pixels are padded to 12 squares of 28.
    assert_eq!(plan(896, 896, 512, 512, PATCH).tokens(), 144);
}

#[test]
fn padding_takes_an_image_at_most_twice_over_the_limit() {
    for width in 1..400 {
        for height in [1, 13, 100, 512, 2048, 3591, 4778, 7167, 7181, 13_581, 16_384] {
            assert!(plan(width, height, 1024, 512, PATCH).patches() <= 2048, "{width} x {height}");
        }
    }
}

#[test]
fn preprocessing_is_exact() {
    let golden = Golden::open("golden/components/image.safetensors");
    let json: serde_json::Value = serde_json::from_slice(&component("image.json")).unwrap();
    for name in ["rgb_pad", "rgb_exact", "rgb_shrink", "rgba_pad", "rgba_shrink", "tiny"] {
        let expected = &json[name];
        let bitmap = decode(&component(expected["file"].as_str().unwrap()), &Limits::default()).unwrap();
        assert_eq!(bitmap.channels, if name.starts_with("rgba") { 4 } else { 3 });
        let patch_limit = expected["in_patch_limit"].as_u64().unwrap() as usize;
        let processing = Processing { patch_limit, ..Processing::default() };
        let (rgb, plan) = padded_rgb(bitmap.clone(), &processing, PATCH);
        assert_eq!(plan, plan_of(expected), "{name}");
        assert!(rgb == golden.bytes(&format!("{name}.rgb")), "{name}");
        let found = patches(bitmap, &processing, PATCH);
        assert!(max_abs(&found.pixels, &golden.f64(&format!("{name}.pixels"))) <= 1e-7, "{name}");
    }
}

#[test]
fn parts_of_the_tower() {
    let golden = Golden::open("golden/components/vision_parts.safetensors");
    let compute = compute(2);
    for kernels in Kernels::NAMES.iter().filter_map(|name| Kernels::named(name).ok()) {
        let mut x = golden.f32("gelu_x");
        (kernels.gelu_tanh)(&mut x);
        assert!(max_abs(&x, &golden.f64("gelu_tanh_f64")) <= 1e-6);
        let mut x = golden.f32("gelu_x");
        (kernels.gelu_erf)(&mut x);
        assert!(max_abs(&x, &golden.f64("gelu_erf_f64")) <= 1e-6);
    }
    let table = Matrix::f32(120, 8, golden.f32("table"));
    for (rows, columns) in [(12, 10), (24, 30), (2, 14), (4, 6)] {
        let mut x = vec![0.0; rows * columns * 8];
        add_positions(&compute, &table, (12, 10), (rows, columns), &mut x);
        assert!(max_abs(&x, &golden.f64(&format!("pos_{rows}x{columns}_f64"))) <= 1e-6, "{rows} {columns}");
        let expected = golden.f64(&format!("rope_{rows}x{columns}_f64"));
        for (patch, pairs) in expected.chunks_exact(16).enumerate() {
            for (pair, expected) in pairs.iter().enumerate() {
                let coordinate = if pair % 2 == 0 { patch % columns } else { patch / columns };
                assert!((angle(coordinate, pair / 2, 32) - expected).abs() <= 1e-6);
            }
        }
    }
    let mut heads = golden.f32("rot_in");
    let rotation = Rotation::new(6, 32);
    for (patch, heads) in heads.chunks_exact_mut(2 * 32).enumerate() {
        heads.chunks_exact_mut(32).for_each(|head| rotation.rotate(head, patch / 6, patch % 6));
    }
    assert!(max_abs(&heads, &golden.f64("rot_4x6_f64")) <= 1e-6);
}

fn open(model: &str) -> Vision {
    let (source, config) = open_source(&path(model)).unwrap();
    Vision::open(&source, &config).unwrap()
}

fn tiny_image() -> Vec<u8> {
    std::fs::read(path("golden/tiny-k3/image.png")).unwrap()
}

#[test]
fn the_tower_on_the_checkpoint() {
    let golden = Golden::open("golden/tiny-k3/vision.safetensors");
    let vision = open("golden/tiny-k3/ckpt");
    let file = tiny_image();
    let bitmap = decode(&file, &Limits::default()).unwrap();
    let cut = patches(bitmap, &vision.config().processing, PATCH);
    assert!(max_abs(&cut.pixels, &golden.f64("pixels")) <= 1e-7);
    assert_eq!(vec![cut.plan.grid_height as u32, cut.plan.grid_width as u32], golden.u32("grid_hw"));

    let mut rows = Vec::new();
    for threads in [1, 3] {
        let mut stages = 0;
        let image = vision
            .rows_watched(&compute(threads), &file, &mut |stage, values| {
                let name = match stage {
                    Stage::Embed => "embed_f64".to_owned(),
                    Stage::Block(number) => format!("block{number}_f64"),
                    Stage::Encoder => "encoder_f64".to_owned(),
                };
                let error = max_abs(values, &golden.f64(&name));
                assert!(error <= 1e-4, "{name}: {error:e}");
                stages += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(stages, 5);
        let error = max_abs(&image.rows, &golden.f64("out_f64"));
        assert!(error <= 1e-4, "out: {error:e}");
        let in_prompt = Golden::open("golden/tiny-k3/image.safetensors").f64("image_rows_f64");
        assert!(max_abs(&image.rows, &in_prompt) <= 1e-4);
        let size = vision.measure(&file).unwrap();
        assert_eq!((image.tokens, image.width, image.height), (size.tokens, size.width, size.height));
        assert_eq!(image.tokens, golden.shape("out_f64")[0]);
        rows.push(image.rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    }
    assert!(rows[0] == rows[1], "rows depend on the number of threads");
}

/// The container's tower is f32 but for the projector (Q4G): the encoder agrees to rounding, the rows with the
/// projector recomputed in f64 on the decoded weights.
#[test]
fn the_tower_on_a_container_of_another_tool() {
    let golden = Golden::open("golden/tiny-k3/vision.safetensors");
    let vision = open("interop/tiny-k3.waste");
    let mut encoder = Vec::new();
    let mut keep = |stage, values: &[f32]| {
        if stage == Stage::Encoder {
            encoder = values.to_vec();
        }
        Ok(())
    };
    let image = vision.rows_watched(&compute(2), &tiny_image(), &mut keep).unwrap();
    assert!(max_abs(&encoder, &golden.f64("encoder_f64")) <= 1e-4);

    let (source, _) = open_source(&path("interop/tiny-k3.waste")).unwrap();
    let waste_engine::weights::Source::Container(container) = source else { panic!() };
    let weights = |name: &str| {
        let trunk = container.trunk();
        trunk.decode(trunk.require(&format!("mm_projector.{name}.weight")).unwrap()).unwrap()
    };
    let product = |weights: &[f32], x: &[f64]| -> Vec<f64> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        weights.chunks_exact(x.len()).map(dot).collect()
    };
    let (first, second, norm) = (weights("proj.0"), weights("proj.2"), weights("post_norm"));
    let (hidden, columns) = (64, 6);
    let mut expected = Vec::new();
    for token in 0..image.tokens {
        let (a, b) = (token / (columns / 2), token % (columns / 2));
        let square = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(y, x)| {
            let patch = (2 * a + y) * columns + 2 * b + x;
            encoder[patch * hidden..][..hidden].iter().map(|&v| f64::from(v)).collect::<Vec<_>>()
        });
        let inner: Vec<f64> = product(&first, &square.concat()).into_iter().map(gelu).collect();
        let out = product(&second, &inner);
        let square_mean = out.iter().map(|x| x * x).sum::<f64>() / out.len() as f64;
        let factor = 1.0 / (square_mean + 1e-5).sqrt();
        expected.extend(out.iter().zip(&norm).map(|(x, w)| x * factor * f64::from(*w)));
    }
    let error = max_abs(&image.rows, &expected);
    assert!(error <= 1e-4, "{error:e}");
    // Four bits are coarse, but it is the same picture.
    let error = relative_l2(&image.rows, &golden.f64("out_f64"));
    assert!((1e-3..0.3).contains(&error), "{error}");
}

type Encode<'a> = dyn Fn(&str, &[u64], Vec<f32>) -> (TrunkFmt, Vec<u64>, Vec<f32>) + 'a;

/// A copy of the container whose tower is stored as `encode` says: format, shape and weights of a name, shape, weights.
fn rewritten(encode: &Encode) -> tempfile::TempDir {
    let original = path("interop/tiny-k3.waste");
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(&original).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let container = Container::open(&original).unwrap();
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(original.join("manifest.json")).unwrap()).unwrap();
    let mut trunk = std::fs::read(original.join("trunk.bin")).unwrap();
    for entry in manifest["trunk"].as_array_mut().unwrap() {
        let name = entry["name"].as_str().unwrap().to_owned();
        if name.starts_with("language_model.") {
            continue;
        }
        let stored = container.trunk().require(&name).unwrap();
        let (fmt, shape, weights) = encode(&name, &stored.shape, container.trunk().decode(stored).unwrap());
        let cols = *shape.last().unwrap() as usize;
        let encoded = fmt.encode_rows(&weights, weights.len() / cols, cols).unwrap();
        trunk.resize(trunk.len().next_multiple_of(64), 0);
        let (off, scale_off) = (trunk.len(), trunk.len() + encoded.payload.len());
        trunk.extend(encoded.payload);
        trunk.extend(encoded.scales.iter().flat_map(|scale| scale.to_le_bytes()));
        *entry = serde_json::json!({
            "name": name, "fmt": fmt, "off": off, "shape": shape, "bytes": trunk.len() - off,
        });
        if fmt.is_grouped() {
            entry["group"] = 128.into();
            entry["scale_off"] = scale_off.into();
        }
    }
    std::fs::write(copy.path().join("trunk.bin"), trunk).unwrap();
    std::fs::write(copy.path().join("manifest.json"), manifest.to_string()).unwrap();
    copy
}

/// Matrices of any format, the convolution with rank 4 or flattened: all give what their decoded weights give.
#[test]
fn the_tower_is_read_in_every_format_and_rank() {
    for fmt in [TrunkFmt::F16, TrunkFmt::Q8g, TrunkFmt::Q4g, TrunkFmt::Q3g] {
        for flat in [false, true] {
            let stored = rewritten(&|_, shape, weights| {
                let shape = match shape {
                    [_] => return (TrunkFmt::F32, shape.to_vec(), weights),
                    [out, rest @ ..] if flat && rest.len() == 3 => vec![*out, rest.iter().product()],
                    _ => shape.to_vec(),
                };
                (fmt, shape, weights)
            });
            let container = Container::open(stored.path()).unwrap();
            let decoded = rewritten(&|name, shape, _| {
                let trunk = container.trunk();
                (TrunkFmt::F32, shape.to_vec(), trunk.decode(trunk.require(name).unwrap()).unwrap())
            });
            let rows = [&stored, &decoded].map(|dir| {
                let (source, config) = open_source(dir.path()).unwrap();
                Vision::open(&source, &config).unwrap().rows(&compute(2), &tiny_image()).unwrap().rows
            });
            let expected: Vec<f64> = rows[1].iter().map(|&x| f64::from(x)).collect();
            let error = max_abs(&rows[0], &expected);
            assert!(error <= 1e-4, "{}, flat {flat}: {error:e}", fmt.name());
            if fmt == TrunkFmt::Q8g {
                let golden = Golden::open("golden/tiny-k3/vision.safetensors").f64("out_f64");
                // The projector was 4-bit before.
                assert!(relative_l2(&rows[0], &golden) < 0.3);
            }
        }
    }
}

/// A tensor that is missing or of another shape is named.
#[test]
fn a_tower_with_a_wrong_tensor_is_refused() {
    let wrong = rewritten(&|name, shape, weights| {
        let mut shape = shape.to_vec();
        if name.ends_with("blocks.1.wo.weight") {
            shape.swap(0, 1);
        }
        (TrunkFmt::F32, shape, weights)
    });
    let (source, config) = open_source(wrong.path()).unwrap();
    let error = Vision::open(&source, &config).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("blocks.1.wo.weight") && error.exit() == Exit::Data, "{error}");
    std::fs::write(wrong.path().join("vision.json"), "[]").unwrap();
    assert!(Vision::open(&source, &config).is_err());
    std::fs::remove_file(wrong.path().join("vision.json")).unwrap();
    assert_eq!(Vision::open(&source, &config).map(|_| ()).unwrap_err().code(), "unreadable_file");
}

/// The exact GELU in f64, by Simpson's rule.
fn gelu(x: f64) -> f64 {
    let end = (x.abs() / 2f64.sqrt()).min(6.0);
    let f = |t: f64| (-t * t).exp();
    let step = end / 256.0;
    let inner: f64 = (1..256).map(|i| f(i as f64 * step) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
    let erf = (f(0.0) + inner + f(end)) * step / 3.0 * 2.0 / std::f64::consts::PI.sqrt();
    0.5 * x * (1.0 + erf.copysign(x))
}

#[test]
fn the_rational_error_function_is_right_everywhere() {
    for i in -4000..=4000 {
        let x = i as f32 / 500.0;
        let mut found = [x];
        (Kernels::detect().gelu_erf)(&mut found);
        assert!((f64::from(found[0]) - gelu(f64::from(x))).abs() <= 1e-6, "{x}: {}", found[0]);
    }
}

#[test]
fn a_watcher_ends_the_computation() {
    let vision = open("golden/tiny-k3/ckpt");
    let mut seen = 0;
    let ended = vision.rows_watched(&compute(1), &tiny_image(), &mut |stage, _| {
        seen += 1;
        if stage == Stage::Block(0) { Err(EngineError::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(ended, Err(EngineError::Interrupted)) && seen == 2);
}

#[test]
fn the_patch_limit_is_the_callers() {
    let (source, model) = open_source(&path("golden/tiny-k3/ckpt")).unwrap();
    let mut config = VisionConfig::read(&source, &model).unwrap();
    assert_eq!(config.processing, Processing::default());
    assert_eq!(config.set_patch_limit(3).unwrap_err().exit(), Exit::Usage);
    config.set_patch_limit(8).unwrap();
    let vision = Vision::with_config(&source, &model, config, Limits::default()).unwrap();
    let size = vision.measure(&tiny_image()).unwrap();
    let image = vision.rows(&compute(2), &tiny_image()).unwrap();
    assert!(image.tokens < 6 && image.tokens == size.tokens && image.rows.len() == image.tokens * 256);
    assert!(image.rows.iter().all(|x| x.is_finite()));
}

#[test]
fn what_is_not_implemented_is_refused() {
    let (_, model) = open_source(&path("golden/tiny-k3/ckpt")).unwrap();
    let shape = model.vision.clone().unwrap();
    let read = |tower: serde_json::Value, media: serde_json::Value| {
        VisionConfig::from_json(shape.clone(), &tower, &media)
    };
    let none = || serde_json::json!({});
    let usual = read(none(), none()).unwrap();
    assert_eq!((usual.rms_eps, usual.projector_eps), (2f32.powi(-23), 1e-5));
    for (tower, media) in [
        (serde_json::json!({"norm_type": "layernorm"}), none()),
        (serde_json::json!({"merge_kernel_size": [4, 4]}), none()),
        (serde_json::json!({"pos_emb_interpolation_mode": "bicubic"}), none()),
        (serde_json::json!({"attn_bias": true}), none()),
        (serde_json::json!({"vt_rms_eps": 0}), none()),
        (none(), serde_json::json!({"patch_size": 16})),
        (none(), serde_json::json!({"image_std": [0.5, 0, 0.5]})),
        (none(), serde_json::json!({"image_mean": [0.5]})),
        (none(), serde_json::json!({"max_patches": 0})),
        (none(), serde_json::json!({"patch_limit_on_one_side": 0})),
        (none(), serde_json::json!({"patch_limit_on_one_side": 1e9})),
        (none(), serde_json::json!({"fixed_output_tokens": 64})),
        (none(), serde_json::json!({"transparent_bg_config": {"pattern": "white"}})),
        (none(), serde_json::json!([])),
    ] {
        assert!(read(tower.clone(), media.clone()).is_err(), "{tower} {media}");
    }
    let (source, linear) = open_source(&path("golden/tiny-linear/ckpt")).unwrap();
    assert!(Vision::open(&source, &linear).is_err());
}

mod files {
    use super::*;
    use image::{
        DynamicImage, ExtendedColorType, GrayAlphaImage, ImageEncoder, ImageFormat, RgbImage, RgbaImage,
    };

    fn picture() -> RgbImage {
        RgbImage::from_fn(41, 29, |x, y| image::Rgb([(6 * x) as u8, (8 * y) as u8, ((x * y) % 256) as u8]))
    }

    fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut file = std::io::Cursor::new(Vec::new());
        picture.write_to(&mut file, format).unwrap();
        file.into_inner()
    }

    const FORMATS: [ImageFormat; 6] = [
        ImageFormat::Png,
        ImageFormat::Jpeg,
        ImageFormat::Gif,
        ImageFormat::Bmp,
        ImageFormat::Tga,
        ImageFormat::WebP,
    ];

    fn all() -> Vec<(ImageFormat, Vec<u8>)> {
        FORMATS.iter().map(|&format| (format, encoded(&picture().into(), format))).collect()
    }

    #[test]
    fn every_format_is_read() {
        let original = picture();
        for (format, file) in all() {
            let found = decode(&file, &Limits::default()).unwrap();
            assert_eq!((found.width, found.height), (41, 29), "{format:?}");
            assert_eq!(dimensions(&file, &Limits::default()).unwrap(), (41, 29));
            let lossy = match format {
                ImageFormat::Jpeg | ImageFormat::Gif => 24.0,
                _ => 0.0,
            };
            let colours = found.data.chunks_exact(found.channels).zip(original.pixels());
            let error: f64 = colours
                .map(|(f, o)| (0..3).map(|c| f64::from(f[c].abs_diff(o.0[c]))).sum::<f64>())
                .sum::<f64>()
                / (3 * 41 * 29) as f64;
            assert!(error <= lossy, "{format:?}: {error}");
        }
    }

    #[test]
    fn transparency_is_kept_and_depth_is_narrowed() {
        let rgba = RgbaImage::from_fn(9, 7, |x, y| image::Rgba([x as u8, y as u8, 77, (x * 28) as u8]));
        for format in [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Tga] {
            let found = decode(&encoded(&rgba.clone().into(), format), &Limits::default()).unwrap();
            assert!(found.channels == 4 && found.data == *rgba.as_raw(), "{format:?}");
        }
        let gray = GrayAlphaImage::from_fn(3, 3, |x, _| image::LumaA([200, x as u8]));
        let found = decode(&encoded(&gray.into(), ImageFormat::Png), &Limits::default()).unwrap();
        assert!(found.channels == 4 && found.data[..8] == [200, 200, 200, 0, 200, 200, 200, 1]);
        let deep = DynamicImage::from(picture()).into_rgb16();
        let found = decode(&encoded(&deep.into(), ImageFormat::Png), &Limits::default()).unwrap();
        assert_eq!(found.data, *picture().as_raw());
    }

    /// An APP1 segment that says how the camera was held.
    fn with_orientation(jpeg: &[u8], orientation: u8) -> Vec<u8> {
        let mut exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
        exif.extend([orientation, 0, 0, 0, 0, 0, 0]);
        let mut file = jpeg[..2].to_vec();
        file.extend([0xff, 0xe1]);
        file.extend((exif.len() as u16 + 2).to_be_bytes());
        file.extend(exif);
        file.extend(&jpeg[2..]);
        file
    }

    #[test]
    fn images_are_turned_upright() {
        let jpeg = encoded(&picture().into(), ImageFormat::Jpeg);
        let plain = decode(&jpeg, &Limits::default()).unwrap();
        for (orientation, size) in [(1, (41, 29)), (3, (41, 29)), (6, (29, 41)), (8, (29, 41))] {
            let file = with_orientation(&jpeg, orientation);
            assert_eq!(dimensions(&file, &Limits::default()).unwrap(), size, "{orientation}");
            let found = decode(&file, &Limits::default()).unwrap();
            assert_eq!((found.width, found.height), size);
            // Where the first pixel of the stored rows goes.
            let (x, y) = match orientation {
                1 => (0, 0),
                3 => (40, 28),
                6 => (28, 0),
                _ => (0, 40),
            };
            assert_eq!(found.data[(y * size.0 + x) * 3..][..3], plain.data[..3], "{orientation}");
        }
    }

    #[test]
    fn truncated_images_are_refused() {
        for (format, file) in all() {
            for part in [1, 2, 4, 6, 7] {
                let cut = &file[..file.len() * part / 8];
                let error = decode(cut, &Limits::default()).map(|_| ()).unwrap_err();
                assert_eq!((error.exit(), error.code()), (Exit::Data, "image_invalid"), "{format:?} {part}");
            }
        }
    }

    fn tga(width: u16, height: u16) -> Vec<u8> {
        let mut file = vec![0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        file.extend(width.to_le_bytes());
        file.extend(height.to_le_bytes());
        file.extend([24, 0]);
        file.extend([0xff, 1, 2, 3].repeat(64));
        file
    }

    /// Headers that promise what must not be allocated, in files of some bytes.
    #[test]
    fn huge_and_empty_images_are_refused_by_their_headers() {
        let patched = |format, at: usize, bytes: &[u8]| {
            let mut file = encoded(&picture().into(), format);
            file[at..at + bytes.len()].copy_from_slice(bytes);
            file
        };
        let jpeg = encoded(&picture().into(), ImageFormat::Jpeg);
        let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap() + 5;
        let png = |width: u32, height: u32| {
            let mut file = encoded(&picture().into(), ImageFormat::Png);
            file[16..20].copy_from_slice(&width.to_be_bytes());
            file[20..24].copy_from_slice(&height.to_be_bytes());
            let mut crc = crc32(&file[12..29]).to_be_bytes();
            file[29..33].swap_with_slice(&mut crc);
            file
        };
        let mut cases = vec![
            patched(ImageFormat::Jpeg, frame, &[0xff; 4]),
            patched(ImageFormat::Gif, 6, &[0xff; 4]),
            patched(ImageFormat::Bmp, 18, &[0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0]),
            patched(ImageFormat::Bmp, 18, &[0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0x7f]),
            patched(ImageFormat::Gif, 6, &[0; 4]),
            patched(ImageFormat::Bmp, 18, &[0; 8]),
            patched(ImageFormat::Jpeg, frame, &[0; 4]),
            png(65_535, 65_535),
            png(u32::MAX, u32::MAX),
            png(0, 0),
            png(16_384, 16_384),
            png(16_385, 1),
            tga(65_535, 65_535),
            tga(0, 0),
        ];
        let webp = encoded(&picture().into(), ImageFormat::WebP);
        let header = webp.windows(4).position(|tag| tag == b"VP8L").unwrap() + 9;
        cases.push(patched(ImageFormat::WebP, header, &[0xff, 0xff, 0xff, 0x0f]));
        for (number, file) in cases.iter().enumerate() {
            assert_eq!(dimensions(file, &Limits::default()).unwrap_err().code(), "image_invalid", "{number}");
            assert_eq!(decode(file, &Limits::default()).unwrap_err().exit(), Exit::Data, "{number}");
        }
    }

    /// The same by hand as the decoder checks it.
    fn crc32(bytes: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for &byte in bytes {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            }
        }
        !crc
    }

    /// A small file of many pixels is decoded within the limits, and refused beyond them.
    #[test]
    fn limits_are_the_callers() {
        let mut bomb = Vec::new();
        let rows = vec![0u8; 3 * 4000 * 4000];
        let png = image::codecs::png::PngEncoder::new(&mut bomb);
        png.write_image(&rows, 4000, 4000, ExtendedColorType::Rgb8).unwrap();
        assert!(bomb.len() < 1 << 18);
        let small = Limits { decoded: rows.len() as u64 - 1, ..Limits::default() };
        assert!(decode(&bomb, &small).unwrap_err().to_string().contains("4000 x 4000"));
        assert!(decode(&bomb, &Limits { side: 3999, ..Limits::default() }).is_err());
        assert!(decode(&bomb, &Limits { encoded: bomb.len() - 1, ..Limits::default() }).is_err());
        assert_eq!(
            decode(&bomb, &Limits { decoded: rows.len() as u64, ..Limits::default() }).unwrap().data,
            rows
        );
    }

    /// Damaged files decode to something or are refused; nothing panics, nothing exceeds the limits.
    #[test]
    fn mutations_never_panic() {
        let limits = Limits { side: 512, decoded: 1 << 20, ..Limits::default() };
        let mut files: Vec<Vec<u8>> = all().into_iter().map(|(_, file)| file).collect();
        files.push(with_orientation(&files[1].clone(), 6));
        let mut state = 7u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % bound
        };
        let (mut read, mut refused) = (0, 0);
        for round in 0..3000 {
            let mut file = files[round % files.len()].clone();
            for _ in 0..1 + next(4) {
                // Headers are where it matters.
                let at = if next(2) == 0 { next(file.len().min(64)) } else { next(file.len()) };
                match next(4) {
                    0 => file[at] = next(256) as u8,
                    1 => file[at] ^= 1 << next(8),
                    2 => file[at] = [0, 0xff][next(2)],
                    _ => drop(file.drain(at..(at + 1 + next(8)).min(file.len()))),
                }
                if file.is_empty() {
                    break;
                }
            }
            match decode(&file, &limits) {
                Ok(bitmap) => {
                    read += 1;
                    assert_eq!(bitmap.data.len(), bitmap.width * bitmap.height * bitmap.channels);
                    assert!(bitmap.data.len() <= 1 << 20);
                    patches(bitmap, &Processing { patch_limit: 64, ..Processing::default() }, PATCH);
                }
                Err(error) => {
                    refused += 1;
                    assert_eq!(error.exit(), Exit::Data);
                }
            }
        }
        assert!(read > 100 && refused > 100, "{read} {refused}");
    }
}
