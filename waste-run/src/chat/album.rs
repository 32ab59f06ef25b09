//! The images of a conversation. The model's tower is loaded for the first one, and stays.

use std::path::Path;

use waste_common::cli::{Failure, Output};
use waste_common::plan::VISION_IMAGES;
use waste_engine::Engine;
use waste_engine::chat::ChatFormat;
use waste_engine::vision::{Reader, Vision};

use super::conversation::{Attached, Conversation};
use crate::args::ChatArgs;
use crate::images::{self, Seen};
use crate::open::Found;

/// What reads images, if they are accepted.
pub struct Album {
    reader: Option<Reader>,
    vision: Option<Vision>,
}

impl Album {
    /// Makes the plan count images, if they are asked for.
    ///
    /// # Errors
    /// The model takes none, or its chat format does not.
    pub fn open(
        args: &ChatArgs,
        format: &ChatFormat,
        found: &mut Found,
        dir: &Path,
    ) -> Result<Album, Failure> {
        if args.vision || !args.images.images.is_empty() {
            found.count_images();
        }
        if found.vision() && !format.takes_images() {
            return Err(Failure::usage("the chat format has no place for images; without --raw, K3's has"));
        }
        let reader = match found.vision() {
            true => Some(images::reader(dir, found.config(), &args.images)?),
            false if args.images.max_patches.is_some() => {
                return Err(Failure::usage("--max-patches goes with --image or --vision"));
            }
            false => None,
        };
        Ok(Album { reader, vision: None })
    }

    fn reader(&self) -> Result<&Reader, Failure> {
        self.reader.as_ref().ok_or_else(|| {
            Failure::data("vision_disabled", "images were not planned for; start with --vision to send some")
        })
    }

    /// Looks at an image file.
    ///
    /// # Errors
    /// It is refused, or images are not accepted.
    pub fn look(&self, path: &Path) -> Result<Seen, Failure> {
        Seen::look(self.reader()?, path)
    }

    /// Adds an image to the next message; one that the conversation has already is not encoded again.
    ///
    /// # Errors
    /// There are too many, it is damaged, or it was interrupted.
    pub fn attach(
        &mut self,
        seen: &Seen,
        engine: &Engine,
        conversation: &mut Conversation,
        output: &Output,
    ) -> Result<(), Failure> {
        if conversation.images() >= VISION_IMAGES {
            return Err(Failure::usage(format!(
                "the conversation has {VISION_IMAGES} images, and there is memory for no more; /reset begins anew"
            )));
        }
        let rows = match conversation.rows(seen.sha256()) {
            Some(rows) => rows.to_vec(),
            None => {
                let vision = match &mut self.vision {
                    Some(vision) => vision,
                    empty => empty.insert(self.reader.as_ref().map_or_else(
                        || Err(Failure::internal("images are not accepted")),
                        |reader| Ok(reader.load(engine)?),
                    )?),
                };
                seen.encode(engine, vision, output)?
            }
        };
        conversation.attach(Attached { image: seen.image(), sha256: seen.sha256().to_owned(), rows });
        Ok(())
    }
}
