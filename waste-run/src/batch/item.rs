//! A line of the input: what is asked, and how it is to be answered.

use waste_engine::chat::{ChatFormat, Effort, Json, Prompt, ResponseFormat, read};
use waste_engine::sampler::{Sampler, SamplerOptions, StopMatcher};
use waste_engine::tokenizer::Tokenizer;

use crate::args::EffortArg;
use crate::form::{Form, Forms};

/// The keys of a line.
const KEYS: [&str; 14] = [
    "id",
    "prompt",
    "messages",
    "max_tokens",
    "effort",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "response_format",
];

/// A question.
#[derive(Clone, Debug)]
pub struct Item {
    /// Its name, which no other has.
    pub id: String,
    /// The tokens.
    pub ids: Vec<u32>,
    /// The prompt they are, for whoever reads the answer.
    pub prompt: Prompt,
    /// Whether it is a text to go on with, not a conversation.
    pub raw: bool,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Most tokens of the answer.
    pub tokens: usize,
    /// The answer's form, if it is not that of all.
    pub form: Option<ResponseFormat>,
}

/// What holds for lines that do not say otherwise.
pub struct Defaults<'a> {
    /// Of the model.
    pub tokenizer: &'a Tokenizer,
    /// How conversations are written; `Err` says why there can be none.
    pub format: Result<&'a ChatFormat, String>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end answers.
    pub stop: Vec<String>,
    /// Most tokens.
    pub tokens: usize,
    /// How much to think.
    pub effort: Option<Effort>,
    /// What the answer has to be.
    pub form: &'a Form,
    /// What else it could be.
    pub forms: &'a Forms<'a>,
}

impl Item {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(line: &str, defaults: &Defaults<'_>) -> Result<Item, String> {
        let json = Json::parse(line).map_err(|error| error.to_string())?;
        let object = json.as_object().ok_or("expected an object")?;
        if let Some(key) = object.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(format!("there is no key {key:?}; those there are: {}", KEYS.join(", ")));
        }
        let id = json.get("id").and_then(Json::as_str).filter(|id| !id.is_empty());
        let id = id.ok_or("every line needs an id, a string")?.to_owned();
        let form = json.get("response_format").map(|json| {
            let form = defaults.forms.by_json(json).map_err(|why| format!("response_format: {why}"))?;
            Ok::<_, String>(form.said)
        });
        let form = form.transpose()?;
        let (prompt, raw, ids) = match (json.get("prompt"), json.get("messages")) {
            (Some(Json::String(text)), None) => {
                let bos = defaults.tokenizer.bos();
                let ids = bos.into_iter().chain(defaults.tokenizer.encode(text)).collect();
                (Prompt { thinking: false, ..Prompt::default() }, true, ids)
            }
            (None, Some(messages)) => {
                let format = defaults.format.clone()?;
                let mut prompt = conversation(messages, json.get("effort"), format, defaults.effort)?;
                prompt.response_format = form.as_ref().unwrap_or(&defaults.form.said).clone();
                let ids = format.render(&prompt).map_err(|error| error.to_string())?;
                // Its text is in the tokens; many lines may have the same schema.
                prompt.response_format = ResponseFormat::Text;
                (prompt, false, ids.encode(defaults.tokenizer).ids)
            }
            _ => return Err("a line needs either prompt, a string, or messages, a list".to_owned()),
        };
        let mut sampler = defaults.sampler.clone();
        for (key, value) in [
            ("temperature", &mut sampler.temperature),
            ("top_p", &mut sampler.top_p),
            ("min_p", &mut sampler.min_p),
            ("presence_penalty", &mut sampler.presence_penalty),
            ("frequency_penalty", &mut sampler.frequency_penalty),
        ] {
            if let Some(json) = json.get(key) {
                *value = json.as_f64().ok_or_else(|| format!("{key}: expected a number"))?;
            }
        }
        let whole = |key: &str| match json.get(key) {
            None => Ok(None),
            Some(json) => match json.as_i64().and_then(|number| u64::try_from(number).ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(format!("{key}: expected a whole number from 0")),
            },
        };
        if let Some(k) = whole("top_k")? {
            sampler.top_k = u32::try_from(k).map_err(|_| "top_k is too large".to_owned())?;
        }
        sampler.seed = whole("seed")?.or(sampler.seed);
        sampler.validate().map_err(|error| error.to_string())?;
        let stop = stops(json.get("stop"))?.unwrap_or_else(|| defaults.stop.clone());
        StopMatcher::new(&stop).map_err(|error| error.to_string())?;
        let tokens =
            whole("max_tokens")?.map_or(defaults.tokens, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Ok(Item { id, ids, prompt, raw, sampler, stop, tokens, form })
    }

    /// What draws its tokens; a seed is drawn here if none was given.
    ///
    /// # Errors
    /// None is to be had from the system.
    pub fn seeded(&self) -> Result<SamplerOptions, waste_engine::EngineError> {
        let seed = Sampler::new(self.sampler.clone())?.seed();
        Ok(SamplerOptions { seed: Some(seed), ..self.sampler.clone() })
    }
}

fn conversation(
    messages: &Json,
    effort: Option<&Json>,
    format: &ChatFormat,
    default: Option<Effort>,
) -> Result<Prompt, String> {
    let messages = read::messages(messages).map_err(|error| error.to_string())?;
    if !messages.images.is_empty() {
        return Err("images are not read here".to_owned());
    }
    let effort = match effort {
        None => default,
        Some(json) => {
            let effort = json.as_str().unwrap_or_default().parse::<EffortArg>();
            effort.map_err(|why| format!("effort: {why}"))?.0
        }
    };
    let thinking = format.thinks() && effort.is_some();
    Ok(Prompt { messages: messages.list, thinking, effort: effort.filter(|_| thinking), ..Prompt::default() })
}

fn stops(json: Option<&Json>) -> Result<Option<Vec<String>>, String> {
    let wrong = || "stop: expected a string or a list of strings".to_owned();
    match json {
        None => Ok(None),
        Some(Json::String(text)) => Ok(Some(vec![text.clone()])),
        Some(json) => {
            let list = json.as_array().ok_or_else(wrong)?.iter();
            let list = list.map(|json| json.as_str().map(str::to_owned).ok_or_else(wrong));
            list.collect::<Result<_, _>>().map(Some)
        }
    }
}
