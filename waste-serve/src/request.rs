//! From a body to a [`Job`]: everything that can be refused is refused here, before the line.

use waste_engine::chat::{ChatFormat, Demand, Effort, Guide, Json, Prompt, ResponseFormat, ToolChoice, read};
use waste_engine::sampler::{STOP_STRINGS_MAX, SamplerOptions, StopMatcher, TokenConstraint};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::images::{self, Picture};
use crate::job::Job;
use crate::service::Service;

const MESSAGES_MAX: usize = 4096;
const TOOLS_MAX: usize = 128;
const TOOL_NAME_MAX: usize = 128;

/// A request that was understood.
#[derive(Debug)]
pub struct Asked {
    /// For the worker.
    pub job: Job,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// Whether the model thinks.
    pub thinking: bool,
    /// How much, if it does.
    pub effort: Option<Effort>,
    /// Whether the answer is to be JSON, and whether it is kept to that.
    pub json: Option<Kept>,
    /// Whether a tool asks for arguments that follow its schema.
    pub strict: bool,
}

/// How an answer comes to be what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// No other token can be chosen.
    Enforced,
    /// The prompt asks for it.
    Prompt,
}

impl Kept {
    /// The word for it in answers.
    pub fn name(self) -> &'static str {
        match self {
            Kept::Enforced => "enforced",
            Kept::Prompt => "prompt-only",
        }
    }
}

/// A chat's prompt, with what the request says about thinking.
#[derive(Debug)]
struct Chat {
    prompt: Prompt,
    pictures: Vec<Picture>,
    strict: bool,
    /// The tools of which one must be called.
    must_call: Vec<String>,
}

/// Reads `/v1/chat/completions`.
///
/// # Errors
/// The first thing that is wrong.
pub fn chat(service: &Service, body: &Json, owner: u64) -> Result<Asked, ApiError> {
    let fields = Fields::new(body)?;
    service.check_model(fields)?;
    fields.refuse(&[
        ("functions", "use tools instead"),
        ("function_call", "use tool_choice instead"),
        ("audio", "there is no audio"),
        ("web_search_options", "there is no web search"),
        ("moderation", "there is no moderation"),
    ])?;
    if fields.list("modalities")?.is_some_and(|list| list.iter().any(|mode| mode.as_str() != Some("text"))) {
        return Err(ApiError::unsupported("modalities", "only text can be answered"));
    }
    let format = service.format()?;
    let Chat { prompt, pictures, strict, must_call } = conversation(service, format, fields)?;
    let encoded = format.render(&prompt)?.encode(&service.tokenizer);
    let images = service.images.as_ref().map(|images| images.seen(pictures, &encoded)).transpose()?;
    let logprobs = match (fields.bool("logprobs")?, fields.whole("top_logprobs", 0, 20)?) {
        (Some(true), count) => Some(count.unwrap_or(0) as usize),
        (_, Some(1..)) => {
            return Err(ApiError::value("top_logprobs", "top_logprobs needs logprobs: true"));
        }
        _ => None,
    };
    let limit = match fields.whole("max_completion_tokens", 1, i64::MAX)? {
        None => fields.whole("max_tokens", 1, i64::MAX)?,
        limit => limit,
    };
    let one_call = fields.bool("parallel_tool_calls")? == Some(false);
    let no_calls = prompt.tools.is_empty() || prompt.tool_choice == ToolChoice::None;
    let (thinking, effort) = (prompt.thinking, prompt.effort.filter(|_| prompt.thinking));
    let stop = stops(fields)?;
    let reply = format.reply(&prompt, &service.stop_ids, stop);
    let max_tokens = service.room("messages", encoded.ids.len(), limit)?;
    let text = text_constraint(service, fields, &prompt.response_format)?;
    let kept = if text.is_some() { Kept::Enforced } else { Kept::Prompt };
    let json = (prompt.response_format != ResponseFormat::Text).then_some(kept);
    let tools = match prompt.tool_choice {
        ToolChoice::None => Vec::new(),
        _ => prompt.tools.iter().filter_map(tool_name).map(str::to_owned).collect(),
    };
    let demand = Demand { tools, must_call, text };
    let guide = Guide::new(format, &service.tokenizer, service.vocab, &service.stop_ids, demand, max_tokens);
    let job = Job {
        conversation: encoded.conversation,
        images: images.unwrap_or_default(),
        max_tokens,
        guide,
        ids: encoded.ids,
        reply,
        sampler: sampler(service, fields)?,
        logprobs,
        one_call,
        no_calls,
        owner,
    };
    let (stream, include_usage) = streaming(fields)?;
    Ok(Asked { job, stream, include_usage, thinking, effort, strict, json })
}

/// The token ids of a chat or a text, for `/tokenize`.
///
/// # Errors
/// The first thing that is wrong.
pub fn tokenize(service: &Service, body: &Json) -> Result<Vec<u32>, ApiError> {
    let fields = Fields::new(body)?;
    match fields.text("prompt")? {
        Some(text) => Ok(service.tokenizer.encode(text)),
        None => {
            let format = service.format()?;
            let chat = conversation(service, format, fields)?;
            Ok(format.render(&chat.prompt)?.encode(&service.tokenizer).ids)
        }
    }
}

/// The text of token ids, for `/detokenize`.
///
/// # Errors
/// The first thing that is wrong.
pub fn detokenize(service: &Service, body: &Json) -> Result<String, ApiError> {
    let fields = Fields::new(body)?;
    let list = fields.list("tokens")?;
    let list = list.ok_or_else(|| ApiError::bad("missing_field", "tokens", "tokens are needed"))?;
    let wrong = |id: &Json| ApiError::value("tokens", format!("tokens: a {} is no token id", id.kind()));
    let ids =
        list.iter().map(|id| id.as_i64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(id)));
    let bytes = service.tokenizer.decode(&ids.collect::<Result<Vec<_>, _>>()?);
    let bytes = bytes.map_err(|error| ApiError::value("tokens", error.to_string()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads `/v1/completions`.
///
/// # Errors
/// The first thing that is wrong.
pub fn completion(service: &Service, body: &Json, owner: u64) -> Result<Asked, ApiError> {
    let fields = Fields::new(body)?;
    service.check_model(fields)?;
    fields.refuse(&[("suffix", "there is no filling in")])?;
    if fields.bool("echo")? == Some(true) {
        return Err(ApiError::unsupported("echo", "the prompt is not repeated"));
    }
    let ids = prompt_ids(service, fields)?;
    let logprobs = fields.whole("logprobs", 0, 5)?.map(|count| count as usize);
    let limit = fields.whole("max_tokens", 1, i64::MAX)?;
    let stop = stops(fields)?;
    let prompt = Prompt { thinking: false, ..Prompt::default() };
    let job = Job {
        conversation: ids.len(),
        images: Vec::new(),
        max_tokens: service.room("prompt", ids.len(), limit)?,
        ids,
        reply: ChatFormat::raw(&service.tokenizer).reply(&prompt, &service.stop_ids, stop),
        sampler: sampler(service, fields)?,
        logprobs,
        one_call: false,
        no_calls: false,
        guide: None,
        owner,
    };
    let (stream, include_usage) = streaming(fields)?;
    Ok(Asked { job, stream, include_usage, thinking: false, effort: None, strict: false, json: None })
}

fn prompt_ids(service: &Service, fields: Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let several = || ApiError::unsupported("prompt", "one prompt a request");
    let wrong = || ApiError::bad("invalid_type", "prompt", "expected a string, or a list of token ids");
    let encode = |text: &str| match service.settings.completions_markup {
        true => service.tokenizer.encode_markup(text),
        false => service.tokenizer.encode(text),
    };
    let ids = match fields.get("prompt") {
        None => return Err(ApiError::bad("missing_field", "prompt", "a prompt is needed")),
        Some(Json::String(text)) => encode(text),
        Some(Json::Array(list)) => match list.as_slice() {
            [Json::String(text)] => encode(text),
            [Json::Array(_)] | [Json::String(_) | Json::Array(_), ..] => return Err(several()),
            ids => {
                let vocab = service.vocab as i64;
                let id = |id: &Json| match id.as_i64() {
                    Some(id) if (0..vocab).contains(&id) => Ok(id as u32),
                    Some(id) => Err(ApiError::value("prompt", format!("{id} is no token id below {vocab}"))),
                    None => Err(wrong()),
                };
                ids.iter().map(id).collect::<Result<_, _>>()?
            }
        },
        Some(_) => return Err(wrong()),
    };
    // Something has to go through the model.
    match (ids.is_empty(), service.tokenizer.bos()) {
        (true, Some(bos)) => Ok(vec![bos]),
        (true, None) => Err(ApiError::value("prompt", "the prompt is empty")),
        (false, _) => Ok(ids),
    }
}

fn streaming(fields: Fields<'_>) -> Result<(bool, bool), ApiError> {
    for name in ["n", "best_of"] {
        if fields.whole(name, i64::MIN, i64::MAX)?.is_some_and(|n| n != 1) {
            return Err(ApiError::unsupported(name, format!("{name}: only 1 answer a request")));
        }
    }
    let usage = match fields.object("stream_options")? {
        None => false,
        Some(options) => Fields::new(options)?.bool("include_usage")?.unwrap_or(false),
    };
    Ok((fields.bool("stream")?.unwrap_or(false), usage))
}

fn stops(fields: Fields<'_>) -> Result<StopMatcher, ApiError> {
    let strings = fields.texts("stop")?;
    if strings.len() > STOP_STRINGS_MAX {
        let message = format!("{} stop strings; at most {STOP_STRINGS_MAX} are accepted", strings.len());
        return Err(ApiError::value("stop", message));
    }
    StopMatcher::new(&strings).map_err(|error| ApiError::value("stop", error.to_string()))
}

fn sampler(service: &Service, fields: Fields<'_>) -> Result<SamplerOptions, ApiError> {
    let default = &service.settings.sampler;
    Ok(SamplerOptions {
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(default.temperature),
        top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(default.top_p),
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(default.min_p),
        top_k: fields.whole("top_k", 0, i64::from(u32::MAX))?.map_or(default.top_k, |k| k as u32),
        // A negative seed is a seed too.
        seed: fields.whole("seed", i64::MIN, i64::MAX)?.map(i64::cast_unsigned),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        logit_bias: fields.biases("logit_bias", service.vocab)?,
    })
}

fn conversation(service: &Service, format: &ChatFormat, fields: Fields<'_>) -> Result<Chat, ApiError> {
    let list = fields.get("messages");
    let list = list.ok_or_else(|| ApiError::bad("missing_field", "messages", "messages are needed"))?;
    match list.as_array().map(<[Json]>::len) {
        None => return Err(ApiError::bad("invalid_type", "messages", "messages: expected a list")),
        Some(0) => return Err(ApiError::value("messages", "messages: at least one is needed")),
        Some(count) if count > MESSAGES_MAX => {
            let message = format!("{count} messages; at most {MESSAGES_MAX} are accepted");
            return Err(ApiError::value("messages", message));
        }
        Some(_) => (),
    }
    let messages = read::messages(list)?;
    let pictures = images::look(service.images.as_ref(), &messages.images)?;
    let (tools, strict) = tools(format, fields)?;
    let (tool_choice, must_call) = tool_choice(&tools, fields)?;
    let (thinking, effort) = thinking(service, format, fields)?;
    let prompt = Prompt {
        messages: messages.list,
        images: pictures.iter().map(Picture::image).collect(),
        tools,
        tool_choice,
        response_format: response_format(fields)?,
        thinking,
        effort,
        ..Prompt::default()
    };
    Ok(Chat { prompt, pictures, strict, must_call })
}

fn tools(format: &ChatFormat, fields: Fields<'_>) -> Result<(Vec<Json>, bool), ApiError> {
    let Some(list) = fields.list("tools")?.filter(|list| !list.is_empty()) else {
        return Ok((Vec::new(), false));
    };
    if !format.calls_tools() {
        return Err(ApiError::unsupported("tools", "this model's chat format has no tools"));
    }
    if list.len() > TOOLS_MAX {
        return Err(ApiError::value("tools", format!("{} tools; at most {TOOLS_MAX}", list.len())));
    }
    let mut names = Vec::new();
    let mut strict = false;
    for (i, tool) in list.iter().enumerate() {
        let param = format!("tools[{i}]");
        if tool.get("type").and_then(Json::as_str) != Some("function") {
            return Err(ApiError::unsupported(&param, "only tools of type function"));
        }
        let name = tool_name(tool).ok_or_else(|| {
            let message = format!("{param}.function.name: expected 1 to {TOOL_NAME_MAX} characters");
            ApiError::value(&param, message)
        })?;
        if names.contains(&name) {
            return Err(ApiError::value(&param, format!("{param}: {name:?} is declared twice")));
        }
        names.push(name);
        strict |= tool.get("function").and_then(|function| function.get("strict")) == Some(&Json::Bool(true));
    }
    Ok((list.to_vec(), strict))
}

fn tool_name(tool: &Json) -> Option<&str> {
    let name = tool.get("function")?.get("name")?.as_str()?;
    let sound = (1..=TOOL_NAME_MAX).contains(&name.chars().count()) && !name.chars().any(char::is_control);
    sound.then_some(name)
}

/// What the prompt says about calling tools, and those of which one must be called.
fn tool_choice(tools: &[Json], fields: Fields<'_>) -> Result<(ToolChoice, Vec<String>), ApiError> {
    let Some(choice) = fields.get("tool_choice") else { return Ok((ToolChoice::Auto, Vec::new())) };
    let wrong = || ApiError::value("tool_choice", "tool_choice: expected auto, none, required or a function");
    let kind = choice.as_str().or_else(|| choice.get("type").and_then(Json::as_str)).ok_or_else(wrong)?;
    let named = |choice: &Json| {
        let name = choice.get("function").and_then(|function| function.get("name")).and_then(Json::as_str);
        let name = name.ok_or_else(wrong)?;
        match tools.iter().any(|tool| tool_name(tool) == Some(name)) {
            true => Ok(name.to_owned()),
            false => Err(ApiError::value("tool_choice", format!("tool_choice: no tool is called {name:?}"))),
        }
    };
    if tools.is_empty() && !matches!(kind, "auto" | "none") {
        return Err(ApiError::value("tool_choice", "tool_choice: there are no tools to call"));
    }
    Ok(match kind {
        "none" if !tools.is_empty() => (ToolChoice::None, Vec::new()),
        "auto" | "none" => (ToolChoice::Auto, Vec::new()),
        "required" => (ToolChoice::Required, tools.iter().filter_map(tool_name).map(str::to_owned).collect()),
        "function" => (ToolChoice::Required, vec![named(choice)?]),
        "allowed_tools" => {
            let allowed = choice.get("allowed_tools").unwrap_or(choice);
            let list = allowed.get("tools").and_then(Json::as_array).ok_or_else(wrong)?;
            let names = list.iter().map(named).collect::<Result<Vec<_>, _>>()?;
            match allowed.get("mode").and_then(Json::as_str) {
                Some("required") if !names.is_empty() => (ToolChoice::Required, names),
                Some("auto") => (ToolChoice::Auto, Vec::new()),
                _ => return Err(wrong()),
            }
        }
        _ => return Err(wrong()),
    })
}

fn response_format(fields: Fields<'_>) -> Result<ResponseFormat, ApiError> {
    let Some(json) = fields.object("response_format")? else { return Ok(ResponseFormat::Text) };
    match json.get("type").and_then(Json::as_str) {
        Some("text" | "json_object") => (),
        Some("json_schema") => {
            if json.get("json_schema").and_then(|outer| outer.get("schema")).is_none() {
                let message = "response_format: json_schema needs json_schema.schema";
                return Err(ApiError::bad("missing_field", "response_format", message));
            }
        }
        _ => {
            let message = "response_format.type: expected text, json_object or json_schema";
            return Err(ApiError::value("response_format", message));
        }
    }
    Ok(read::response_format(json))
}

/// What keeps a text to the response format. A schema that cannot be kept to is refused if it is strict, else the
/// prompt alone asks for it.
fn text_constraint(
    service: &Service,
    fields: Fields<'_>,
    format: &ResponseFormat,
) -> Result<Option<Box<dyn TokenConstraint>>, ApiError> {
    if *format == ResponseFormat::Text {
        return Ok(None);
    }
    let outer = fields.object("response_format")?.and_then(|json| json.get("json_schema"));
    let strict = outer.and_then(|outer| outer.get("strict")) == Some(&Json::Bool(true));
    match service.grammars()?.response_format(format) {
        Err(_) if !strict && matches!(format, ResponseFormat::JsonSchema(_)) => Ok(None),
        Err(error) => Err(ApiError::bad("unsupported_schema", "response_format", error.to_string())),
        Ok(constraint) => Ok(constraint.map(|constraint| Box::new(constraint) as Box<dyn TokenConstraint>)),
    }
}

/// Whether and how much to think: of the several ways to say it, the first that is there.
fn thinking(
    service: &Service,
    format: &ChatFormat,
    fields: Fields<'_>,
) -> Result<(bool, Option<Effort>), ApiError> {
    let template = fields.object("chat_template_kwargs")?.map(Fields::new).transpose()?;
    let reasoning = fields.object("reasoning")?.map(Fields::new).transpose()?;
    let of = |fields: Option<Fields<'_>>, name: &str| match fields {
        Some(fields) => Ok(fields.text(name)?.map(str::to_owned)),
        None => Ok::<_, ApiError>(None),
    };
    let mut effort = None;
    for (fields, name) in [
        (Some(fields), "reasoning_effort"),
        (Some(fields), "thinking_effort"),
        (reasoning, "effort"),
        (template, "thinking_effort"),
    ] {
        effort = effort.or(of(fields, name)?);
    }
    let mut switch = match fields.get("thinking") {
        Some(Json::Object(_)) => match fields.get("thinking").and_then(|json| json.get("type")) {
            Some(Json::String(kind)) if kind == "enabled" => Some(true),
            Some(Json::String(kind)) if kind == "disabled" => Some(false),
            _ => return Err(ApiError::value("thinking", "thinking.type: expected enabled or disabled")),
        },
        _ => fields.bool("thinking")?,
    };
    if let Some(template) = template {
        switch = switch.or(template.bool("thinking")?).or(template.bool("enable_thinking")?);
    }
    let strict = service.settings.strict_effort;
    let asked = match effort.as_deref() {
        None => None,
        Some("none" | "minimal" | "off") if !strict => {
            switch.get_or_insert(false);
            None
        }
        Some("medium") if !strict => Some(Effort::High),
        Some("xhigh") if !strict => Some(Effort::Max),
        Some(name) => Some(name.parse().map_err(|_| {
            ApiError::value("reasoning_effort", format!("reasoning_effort: {name:?} is not known"))
        })?),
    };
    if switch == Some(false) && asked.is_some() {
        return Err(ApiError::value("thinking", "thinking is off, so there is no effort to it"));
    }
    if !format.thinks() {
        return Ok((false, None));
    }
    let thinking = switch.unwrap_or(service.settings.effort.is_some() || asked.is_some());
    let effort = asked.or(service.settings.effort).or(Some(Effort::Low));
    Ok((thinking, effort.filter(|_| thinking)))
}
