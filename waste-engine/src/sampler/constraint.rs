//! Texts whose next token depends on all before it.

use std::fmt::Debug;

use super::{Mask, SamplerError};

/// Says token by token what a text may go on with.
pub trait TokenConstraint: Debug + Send + Sync {
    /// The tokens that may come next, special ones not among them; none if the text can only end.
    ///
    /// # Errors
    /// It cannot be found out within the limits set for it.
    fn mask(&mut self) -> Result<Mask, SamplerError>;

    /// Takes the next token of the text.
    ///
    /// # Errors
    /// It is none of those that may come.
    fn accept(&mut self, token: u32) -> Result<(), SamplerError>;

    /// Whether the text may end here.
    ///
    /// # Errors
    /// It cannot be found out within the limits set for it.
    fn may_end(&mut self) -> Result<bool, SamplerError>;

    /// The same text and what may follow it, for another answer.
    fn copy(&self) -> Box<dyn TokenConstraint>;
}

impl Clone for Box<dyn TokenConstraint> {
    fn clone(&self) -> Self {
        (**self).copy()
    }
}
