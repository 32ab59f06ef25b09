//! What the tower made of the images that it saw lately, so that it need not see them again.

/// Images' rows, within so much memory; what was not used longest goes first.
pub struct Gallery {
    kept: Vec<Kept>,
    bytes_max: usize,
    clock: u64,
}

struct Kept {
    owner: u64,
    sha256: String,
    rows: Vec<f32>,
    used: u64,
}

impl Gallery {
    /// Keeps as many as go into so many bytes.
    pub fn new(bytes_max: usize) -> Gallery {
        Gallery { kept: Vec::new(), bytes_max, clock: 0 }
    }

    /// The rows of an owner's image, by the hash of its file.
    pub fn find(&mut self, owner: u64, sha256: &str) -> Option<&[f32]> {
        self.clock += 1;
        let kept = self.kept.iter_mut().find(|kept| kept.owner == owner && kept.sha256 == sha256)?;
        kept.used = self.clock;
        Some(&kept.rows)
    }

    /// Keeps the rows of an image that was not found.
    pub fn keep(&mut self, owner: u64, sha256: &str, rows: Vec<f32>) {
        let bytes = size_of_val(rows.as_slice());
        if bytes > self.bytes_max {
            return;
        }
        while self.bytes() + bytes > self.bytes_max {
            let Some(oldest) = (0..self.kept.len()).min_by_key(|at| self.kept[*at].used) else { break };
            self.kept.swap_remove(oldest);
        }
        self.clock += 1;
        self.kept.push(Kept { owner, sha256: sha256.to_owned(), rows, used: self.clock });
    }

    fn bytes(&self) -> usize {
        self.kept.iter().map(|kept| size_of_val(kept.rows.as_slice())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_and_nobody_sees_what_is_anothers() {
        let mut gallery = Gallery::new(48);
        for (sha256, row) in [("a", 1.0), ("b", 2.0), ("c", 3.0)] {
            gallery.keep(1, sha256, vec![row; 4]);
        }
        let row = |gallery: &mut Gallery, owner, sha256| gallery.find(owner, sha256).map(|rows| rows[0]);
        assert_eq!((row(&mut gallery, 1, "a"), row(&mut gallery, 2, "a")), (Some(1.0), None));
        gallery.keep(2, "a", vec![4.0; 4]);
        assert_eq!((row(&mut gallery, 1, "b"), row(&mut gallery, 2, "a")), (None, Some(4.0)));
        // Two go for one that is larger; what can never fit drives nothing out.
        gallery.keep(1, "d", vec![5.0; 8]);
        assert_eq!((row(&mut gallery, 1, "a"), row(&mut gallery, 1, "c")), (None, None));
        gallery.keep(1, "e", vec![6.0; 13]);
        assert_eq!((row(&mut gallery, 1, "e"), row(&mut gallery, 1, "d")), (None, Some(5.0)));
        assert_eq!(gallery.bytes(), 48);
    }
}
