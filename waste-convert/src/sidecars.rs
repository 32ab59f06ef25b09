//! The small files beside the weights.

use std::path::Path;

use serde_json::{Map, Value};
use waste_common::json;
use waste_common::tokens::{RANK_FILE_BYTES_MAX, Ranks, SPECIALS_FILE_BYTES_MAX, Specials};

use crate::error::ConvertError;
use crate::source::Source;

/// Every sidecar a conversion may write.
pub const NAMES: [&str; 9] = [
    "tokenizer.model",
    "specials.json",
    "vision.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "README.md",
];
/// Those that are copied as they are, if the checkpoint has them.
const COPIED: [&str; 6] =
    ["chat_template.jinja", "generation_config.json", "LICENSE", "LICENSE.md", "LICENSE.txt", "README.md"];
/// Largest other sidecar.
const BYTES_MAX: u64 = 64 << 20;
/// A cap on the prompt cost of an image.
const MAX_PATCHES: u64 = 1024;

/// A sidecar's name and content.
pub type Sidecar = (&'static str, Vec<u8>);

/// What goes beside the weights, and what is worth a warning.
///
/// # Errors
/// A file is there but is not what it should be; a multimodal checkpoint lacks `preprocessor_config.json`.
pub fn collect(source: &Source) -> Result<(Vec<Sidecar>, Vec<String>), ConvertError> {
    let dir = source.checkpoint.dir();
    let (mut files, mut warnings) = (Vec::new(), Vec::new());
    let model = ["tiktoken.model", "tokenizer.model"].map(|name| dir.join(name));
    let ranks = if let Some(file) = model.iter().find(|file| file.exists()) {
        let content = json::read_bounded(file, RANK_FILE_BYTES_MAX)?;
        let ranks = Ranks::parse(&content)
            .map_err(|error| ConvertError::sidecar(file, format!("the rank file is damaged: {error}")))?;
        files.push(("tokenizer.model", content));
        Some(ranks.len())
    } else {
        warnings.push(format!(
            "{} has neither tiktoken.model nor tokenizer.model: the container will know tokens only by number",
            dir.display()
        ));
        None
    };
    let tokenizer = dir.join("tokenizer_config.json");
    if tokenizer.exists() {
        files.push(("specials.json", pretty(&specials(&tokenizer, ranks)?)));
    } else {
        warnings.push(format!(
            "{} has no tokenizer_config.json: special tokens will have no names",
            dir.display()
        ));
    }
    if source.config.vision.is_some() {
        files.push(("vision.json", pretty(&vision(source.checkpoint.config(), dir)?)));
    }
    for name in COPIED {
        if dir.join(name).exists() {
            files.push((name, json::read_bounded(&dir.join(name), BYTES_MAX)?));
        }
    }
    Ok((files, warnings))
}

/// `[{"id", "text"}]` of `added_tokens_decoder`, sorted by id. With the number of `ranks` they are checked as the
/// engine will check them.
fn specials(file: &Path, ranks: Option<usize>) -> Result<Value, ConvertError> {
    let fail = |problem: String| ConvertError::sidecar(file, problem);
    let content = json::read_bounded(file, SPECIALS_FILE_BYTES_MAX)?;
    let config = json::parse(file, &content)?;
    // The text itself is parsed: a key given twice is not seen in `config`.
    if let Some(ranks) = ranks
        && config.get("added_tokens_decoder").is_some()
    {
        Specials::from_checkpoint(ranks, &content)
            .map_err(|error| fail(format!("the special tokens cannot be used: {error}")))?;
    }
    let mut tokens: Vec<(u32, &str)> = Vec::new();
    if let Some(added) = config.get("added_tokens_decoder") {
        let added = added.as_object().ok_or_else(|| fail("`added_tokens_decoder` is no object".into()))?;
        for (id, token) in added {
            let text = token.get("content").and_then(Value::as_str);
            match (id.parse(), text) {
                (Ok(id), Some(text)) => tokens.push((id, text)),
                _ => {
                    let id: String = id.chars().take(40).collect();
                    return Err(fail(format!(
                        "`added_tokens_decoder.{id}`: a number and an object with `content` are expected"
                    )));
                }
            }
        }
    }
    tokens.sort_unstable();
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(fail(format!("`added_tokens_decoder` names the id {} twice", pair[0].0)));
    }
    Ok(tokens.into_iter().map(|(id, text)| serde_json::json!({"id": id, "text": text})).collect())
}

/// The tower's configuration with what else an engine needs to turn pixels into patches.
fn vision(config: &Value, dir: &Path) -> Result<Value, ConvertError> {
    let file = dir.join("preprocessor_config.json");
    let fail = |problem: &str| ConvertError::sidecar(&file, problem);
    if !file.exists() {
        return Err(fail(
            "the file is missing, and without it images would be normalised wrongly; download it too",
        ));
    }
    let preprocessor = json::read(&file, BYTES_MAX)?;
    let media = preprocessor.get("media_proc_cfg").unwrap_or(&preprocessor);
    let mut keys: Map<String, Value> = match config.get("vision_config") {
        Some(Value::Object(vision)) => vision.clone(),
        _ => return Err(ConvertError::sidecar(&dir.join("config.json"), "`vision_config` is no object")),
    };
    keys.entry("vt_rms_eps").or_insert_with(|| f64::from(f32::EPSILON).into());
    if let Some(id) = config.get("media_placeholder_token_id") {
        keys.insert("media_placeholder_token_id".into(), id.clone());
    }
    keys.insert("max_patches".into(), MAX_PATCHES.into());
    for key in ["image_mean", "image_std"] {
        let value = media.get(key).filter(|value| {
            value.as_array().is_some_and(|list| list.len() == 3 && list.iter().all(Value::is_number))
        });
        let value = value.ok_or_else(|| fail(&format!("`{key}` with three numbers is expected")))?;
        keys.insert(key.into(), value.clone());
    }
    for key in ["patch_size", "in_patch_limit", "patch_limit_on_one_side"] {
        if let Some(value) = media.get(key) {
            keys.insert(key.into(), value.clone());
        }
    }
    Ok(keys.into())
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
