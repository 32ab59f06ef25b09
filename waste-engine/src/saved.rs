//! A session in a file: everything needed to go on later with the same text, bit for bit.
//!
//! Magic `WSES`, u32 version, u32 length of the header, the header in JSON, the layers' state in their order (of KDA
//! the recurrent state and the q, k, v histories; of MLA the rows up to the position as they are kept), the image rows
//! that no placeholder has taken yet, and the CRC-32 of all before. Little endian. The file is checked as a whole before
//! anything of a session changes.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use waste_common::error::{Coded, Exit};
use waste_common::files::{AtomicFile, FileError};
use zerocopy::IntoBytes;

use crate::error::EngineError;
use crate::model::Engine;
use crate::sampler::{SamplerOptions, SamplerState};
use crate::session::Session;

const MAGIC: [u8; 4] = *b"WSES";
const VERSION: u32 = 1;
/// Magic, version, length of the header.
const PREFIX: usize = 12;
/// Longest header: the tokens of the longest context.
const HEADER_BYTES_MAX: u32 = 256 << 20;
/// What a read or a checksum takes at a time.
const PIECE: usize = 1 << 20;
// The state is written as it stands in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// What a session is beside the state of its layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// All tokens, those in the state first; the others have not gone through the model yet.
    pub tokens: Vec<u32>,
    /// Images whose rows stand for tokens.
    pub images: Vec<ImageSpan>,
    /// How sampling goes on.
    pub sampler: SamplerState,
    /// Where in `tokens` the last answer begins.
    pub answer: usize,
    /// Tokens that were still to be generated when the session was saved in the middle of an answer.
    pub left: usize,
    /// Whether the model, or a stop string, ended the answer.
    pub ended: bool,
    /// How the last answer was written, if whoever saved it keeps that: an interrupted one can go on the same way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manner: Option<Manner>,
}

/// How an answer is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manner {
    /// How its tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end it.
    pub stop: Vec<String>,
    /// Whether only tokens that have a place in a text are chosen.
    pub masked: bool,
    /// What it has to be.
    pub form: Option<Form>,
}

impl Default for Manner {
    fn default() -> Manner {
        Manner { sampler: SamplerOptions::default(), stop: Vec::new(), masked: true, form: None }
    }
}

/// What a text has to be, as it was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// JSON of this schema.
    JsonSchema(String),
    /// What this grammar describes.
    Grammar(String),
}

/// An image in a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSpan {
    /// Index of its first token.
    pub position: usize,
    /// Its tokens.
    pub tokens: usize,
    /// SHA-256 of the image's file, lower-case hex.
    pub sha256: String,
}

/// What the state depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    model: String,
    arith: String,
    kv: String,
    prefill_chunk: usize,
    position: usize,
    image_rows: usize,
    text: Text,
}

/// Why a session file cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SavedError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} is no session file: it does not begin with `WSES`", path.display())]
    NotASession { path: PathBuf },
    #[error("{} is a session file of version {found}; this program knows version {VERSION}", path.display())]
    Version { path: PathBuf, found: u32 },
    #[error("{} is damaged: {why}; it was left as it is", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error(
        "{} is a session of another model ({found}, this one is {expected}); use another file", path.display()
    )]
    Foreign { path: PathBuf, found: String, expected: String },
    #[error(
        "{} was made with {option} {found}, and this run has {expected}: its text would not go on the same way; use the \
         same options or another file", path.display()
    )]
    Options { path: PathBuf, option: &'static str, found: String, expected: String },
}

impl SavedError {
    fn path(&self) -> Option<&Path> {
        match self {
            SavedError::File(_) => None,
            SavedError::NotASession { path }
            | SavedError::Version { path, .. }
            | SavedError::Damaged { path, .. }
            | SavedError::Foreign { path, .. }
            | SavedError::Options { path, .. } => Some(path),
        }
    }
}

impl Coded for SavedError {
    fn exit(&self) -> Exit {
        match self {
            SavedError::File(error) => error.exit(),
            _ => Exit::Data,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            SavedError::File(error) => error.code(),
            SavedError::NotASession { .. } => "not_a_session_file",
            SavedError::Version { .. } => "session_version",
            SavedError::Damaged { .. } => "session_damaged",
            SavedError::Foreign { .. } => "session_of_another_model",
            SavedError::Options { .. } => "session_of_other_options",
        }
    }

    fn fields(&self) -> Map<String, Value> {
        match self {
            SavedError::File(error) => error.fields(),
            _ => self
                .path()
                .map(|path| ("file".to_owned(), path.display().to_string().into()))
                .into_iter()
                .collect(),
        }
    }
}

/// An opened session file whose checksum is right.
#[derive(Debug)]
pub struct Saved {
    path: PathBuf,
    file: File,
    header: Header,
    /// Where the state begins, and its length.
    state: (u64, u64),
}

impl Saved {
    /// Opens and checks a file; `None` if there is none.
    ///
    /// # Errors
    /// It is no session file, one of a later version, or damaged anywhere.
    pub fn open(path: &Path) -> Result<Option<Saved>, SavedError> {
        let io = |doing| FileError::io(doing, path);
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io("look at")(error).into()),
            // Before opening: a named pipe would block.
            Ok(meta) if !meta.is_file() => return Err(FileError::NotAFile { path: path.to_owned() }.into()),
            Ok(_) => (),
        }
        let file = File::open(path).map_err(io("open"))?;
        let bytes = file.metadata().map_err(io("look at"))?.len();
        let damaged = |why: &str| SavedError::Damaged { path: path.to_owned(), why: why.to_owned() };
        let mut reader = BufReader::with_capacity(PIECE, file);
        let mut prefix = [0; PREFIX];
        let known = read_up_to(&mut reader, &mut prefix).map_err(io("read"))?;
        let u32_at =
            |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
        if known < MAGIC.len() || prefix[..4] != MAGIC {
            return Err(SavedError::NotASession { path: path.to_owned() });
        }
        if known < PREFIX {
            return Err(damaged("it is cut off"));
        }
        if u32_at(4) != VERSION {
            return Err(SavedError::Version { path: path.to_owned(), found: u32_at(4) });
        }
        let header = u32_at(8);
        let start = PREFIX as u64 + u64::from(header);
        let Some(state) = bytes.checked_sub(start + 4).filter(|_| header <= HEADER_BYTES_MAX) else {
            return Err(damaged("it is cut off"));
        };
        let mut json = vec![0; header as usize];
        reader.read_exact(&mut json).map_err(io("read"))?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&prefix);
        crc.update(&json);
        let mut piece = vec![0; PIECE];
        let mut left = state;
        while left > 0 {
            let piece = &mut piece[..left.min(PIECE as u64) as usize];
            reader.read_exact(piece).map_err(io("read"))?;
            crc.update(piece);
            left -= piece.len() as u64;
        }
        let mut sum = [0; 4];
        reader.read_exact(&mut sum).map_err(io("read"))?;
        if u32::from_le_bytes(sum) != crc.finalize() {
            return Err(damaged("its checksum is wrong"));
        }
        let header: Header =
            serde_json::from_slice(&json).map_err(|error| damaged(&format!("its header: {error}")))?;
        let text = &header.text;
        if header.position > text.tokens.len() || text.answer > text.tokens.len() {
            return Err(damaged("its header names more tokens than it has"));
        }
        Ok(Some(Saved { path: path.to_owned(), file: reader.into_inner(), header, state: (start, state) }))
    }

    /// The tokens and what goes with them.
    pub fn text(&self) -> &Text {
        &self.header.text
    }

    /// Tokens in the state.
    pub fn position(&self) -> usize {
        self.header.position
    }

    /// The tokens that have not gone through the model yet.
    pub fn pending(&self) -> &[u32] {
        &self.header.text.tokens[self.header.position..]
    }

    /// Whether it is of this model; before one is loaded.
    ///
    /// # Errors
    /// It is another one's.
    pub fn check_model(&self, fingerprint: &str) -> Result<(), SavedError> {
        if self.header.model == fingerprint {
            return Ok(());
        }
        Err(SavedError::Foreign {
            path: self.path.clone(),
            found: self.header.model.clone(),
            expected: fingerprint.to_owned(),
        })
    }

    /// Puts the state into a session.
    ///
    /// # Errors
    /// It is of another model or of other options, or does not fit into the context: then nothing has changed. The file
    /// cannot be read any more: then the session is unusable but by [`Session::reset`].
    pub fn restore(&mut self, engine: &Engine, session: &mut Session) -> Result<(), EngineError> {
        self.check_model(&engine.fingerprint())?;
        let Header { arith, kv, prefill_chunk, position, image_rows, text, .. } = &self.header;
        let path = || self.path.clone();
        let options = engine.options();
        for (option, found, expected) in [
            ("--arith", arith, options.arith.name().to_owned()),
            ("--kv", kv, options.kv.to_string()),
            ("--prefill-chunk", &prefill_chunk.to_string(), options.chunk.to_string()),
        ] {
            if *found != expected {
                let (path, found) = (path(), found.clone());
                return Err(SavedError::Options { path, option, found, expected }.into());
            }
        }
        EngineError::check_tokens(&text.tokens[..*position], 0, options.ctx, engine.config().vocab)?;
        let row_bytes = engine.config().hidden * size_of::<f32>();
        let images = image_rows.checked_mul(row_bytes).and_then(|bytes| u64::try_from(bytes).ok());
        let layers = session.snapshot_bytes(*position) as u64;
        if images.and_then(|images| images.checked_add(layers)) != Some(self.state.1) {
            return Err(
                SavedError::Damaged { path: path(), why: "its state has another length".to_owned() }.into()
            );
        }
        let io = || FileError::io("read", &self.path);
        session.intact = false;
        (&self.file).seek(SeekFrom::Start(self.state.0)).map_err(io()).map_err(SavedError::from)?;
        let mut reader = BufReader::with_capacity(PIECE, &self.file);
        for part in session.state.iter_mut().flat_map(|state| state.parts_mut(*position)) {
            reader.read_exact(part).map_err(io()).map_err(SavedError::from)?;
        }
        let mut rows = vec![0f32; image_rows * engine.config().hidden];
        reader.read_exact(rows.as_mut_bytes()).map_err(io()).map_err(SavedError::from)?;
        session.image_rows = rows.into();
        session.position = *position;
        session.intact = true;
        Ok(())
    }
}

/// Writes a session to a file, durably and whole or not at all.
///
/// # Errors
/// A pass had failed, so that there is no state to save; the file cannot be written.
pub fn save(engine: &Engine, session: &Session, text: &Text, path: &Path) -> Result<(), EngineError> {
    session.check_intact()?;
    let options = engine.options();
    let rows: Vec<f32> = session.image_rows.iter().copied().collect();
    let header = Header {
        model: engine.fingerprint(),
        arith: options.arith.name().to_owned(),
        kv: options.kv.to_string(),
        prefill_chunk: options.chunk,
        position: session.position,
        image_rows: rows.len() / engine.config().hidden,
        text: text.clone(),
    };
    let json = serde_json::to_vec(&header)
        .map_err(|error| EngineError::Option { what: "session", why: error.to_string() })?;
    let mut file = AtomicFile::create(path).map_err(SavedError::from)?;
    let mut crc = crc32fast::Hasher::new();
    let mut write = |bytes: &[u8]| {
        crc.update(bytes);
        file.append(bytes).map_err(SavedError::from)
    };
    write(&MAGIC)?;
    write(&VERSION.to_le_bytes())?;
    write(&(json.len() as u32).to_le_bytes())?;
    write(&json)?;
    for part in session.state.iter().flat_map(|state| state.parts(session.position)) {
        write(part)?;
    }
    write(rows.as_bytes())?;
    let sum = crc.finalize();
    file.append(&sum.to_le_bytes()).map_err(SavedError::from)?;
    file.commit().map_err(SavedError::from)?;
    Ok(())
}

/// Reads until the buffer is full or the file ends.
fn read_up_to(reader: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..])? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(filled)
}
