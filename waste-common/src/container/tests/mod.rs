//! Tests of reading, writing and refusing.

mod damage;
mod published;
mod written;

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::quant::golden::{noise, path as tests_path};

/// A container made by another tool.
fn interop(name: &str) -> PathBuf {
    tests_path("interop").join(name)
}

fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(interop(name)).unwrap() {
        let entry = entry.unwrap();
        // Content only: the sources may be read-only.
        fs::write(dir.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    dir
}

/// Reads everything there is; counts records and tensors.
fn read_all(container: &Container) -> Result<(usize, usize), ContainerError> {
    let mut records = 0;
    for layer in container.manifest().layers.keys() {
        let bank = container.bank(*layer)?;
        let books = container.layer_codebooks(*layer)?;
        let geometry = container.geometry().unwrap();
        let mut buffer = vec![0; geometry.record_bytes()];
        for expert in 0..bank.experts() as u16 {
            let record = bank.read(expert, &mut buffer)?;
            let expected = bank.expected(expert);
            record.verify_crc(&expected)?;
            record.verify_padding(&expected)?;
            record.verify_indices(&expected)?;
            for kind in Kind::ALL {
                let layout = geometry.layout(kind);
                let mut out = vec![f32::NAN; layout.rows() * layout.cols()];
                record.matrix(kind).decode(&books.tables(kind), &mut out).unwrap();
                assert!(out.iter().all(|w| w.is_finite()));
            }
            records += 1;
        }
        integrity::check_bank(&bank, *layer, container.manifest().integrity.as_ref())?;
    }
    container.check_codebook_headers()?;
    if let Some(books) = container.codebooks() {
        integrity::check_codebooks(books, container.manifest().integrity.as_ref())?;
    }
    for entry in container.trunk().entries() {
        integrity::check_trunk_entry(container.trunk(), entry)?;
        let sizes = container.trunk().sizes(entry)?;
        let whole = container.trunk().decode(entry)?;
        let mut row = vec![0.0; sizes.cols as usize];
        let buffer = &mut RowBuffer::default();
        container.trunk().decode_rows(entry, sizes.rows - 1, 1, &mut row, buffer)?;
        assert_eq!(row, whole[whole.len() - row.len()..]);
    }
    Ok((records, container.trunk().entries().len()))
}
