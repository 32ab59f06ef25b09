/* WASTE: a model engine that streams experts from disk. Copyright of the WASTE authors, Apache-2.0.
 * Generated from waste-capi/src by `UPDATE=1 cargo test -p waste-capi --test header`; do not edit. */

#ifndef WASTE_H
#define WASTE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Manners
 *
 * - Every function that can fail returns a waste_status. What went wrong is told by waste_last_error(), for the last
 *   call of the same thread that failed. A failed call has changed nothing unless its comment says otherwise.
 * - Structs that are handed in begin with `size`, set to sizeof of the struct by the caller; everything else may be
 *   zero, and zero is the default: `waste_options options = {sizeof options};`. NULL stands for all defaults.
 *   Structs that are filled begin with `size` too. So programs and libraries of different age understand each other.
 * - Texts are UTF-8 with a length in bytes, and need no zero at their end; paths are UTF-8 and end with one.
 * - Nothing that the caller hands in is kept after the call. Buffers belong to the caller: functions that fill one take
 *   its capacity, say how much there is, and write what has room.
 * - What waste_open and waste_session_open make is ended by waste_close and waste_session_close, in any order, and
 *   not while a call uses it. A model may be used by several threads at once; their passes wait for each other.
 *   A session is used by one call at a time; a second one is refused.
 * - Nothing is printed, no signal is taken, the process is never ended.
 */

// What a call ends with; the numbers are those of the tools' exit codes.
typedef enum {
    // Done.
    WASTE_STATUS_OK = 0,
    // A wrong argument, or an option out of its range.
    WASTE_STATUS_USAGE = 2,
    // Bad input: a damaged file, a model that is none, a text that does not fit.
    WASTE_STATUS_DATA = 3,
    // Not enough RAM or disk.
    WASTE_STATUS_SPACE = 4,
    // Locked by another process.
    WASTE_STATUS_LOCKED = 6,
    // A bug of the library.
    WASTE_STATUS_INTERNAL = 70,
    // Interrupted by waste_cancel before there was a result.
    WASTE_STATUS_INTERRUPTED = 130,
} waste_status;

// How the latents of a cached token are kept.
typedef enum {
    // f16.
    WASTE_KV_DEFAULT = 0,
    // Four bytes a number.
    WASTE_KV_F32 = 1,
    // Two bytes a number.
    WASTE_KV_F16 = 2,
    // A byte a number.
    WASTE_KV_Q8 = 3,
} waste_kv;

// The arithmetic of decoding.
typedef enum {
    // 16-bit whole numbers, summed exactly.
    WASTE_ARITH_FAST = 0,
    // f32 throughout.
    WASTE_ARITH_EXACT = 1,
} waste_arith;

// Why an answer ended.
typedef enum {
    // The model ended its text.
    WASTE_FINISH_STOP = 0,
    // A stop text came up.
    WASTE_FINISH_STOP_TEXT = 1,
    // What it keeps to allows no more.
    WASTE_FINISH_COMPLETE = 2,
    // It has as many tokens as it may.
    WASTE_FINISH_LENGTH = 3,
    // The context is full.
    WASTE_FINISH_CONTEXT = 4,
    // waste_cancel, or the callback, stopped it. waste_generate without new tokens goes on from there.
    WASTE_FINISH_CANCELLED = 5,
} waste_finish;

// An opened model.
typedef struct waste_model waste_model;

// A text, its state in the model, and how sampling goes on. Independent of other sessions.
typedef struct waste_session waste_session;

// The machine, as this process may use it.
typedef struct {
    // sizeof(waste_machine_info).
    size_t size;
    // RAM built in.
    uint64_t physical_ram_bytes;
    // RAM this process may count on: within the limits of its control groups, without what engines have reserved.
    uint64_t usable_ram_bytes;
    // RAM that engines have reserved, those of this process too.
    uint64_t reserved_bytes;
    // What this process has in RAM; 0 where the system does not tell.
    uint64_t resident_bytes;
    // The most it has had; 0 where the system does not tell.
    uint64_t peak_resident_bytes;
    // CPUs it may run on.
    uint64_t cpus;
} waste_machine_info;

// Told how far waste_open is: `bytes` of `of` that stay in memory are loaded. What it returns stops it if it is not 0:
// it ends with WASTE_STATUS_INTERRUPTED. Called while waste_open runs, by one thread at a time, which may be another.
typedef int32_t (*waste_on_load)(void *user, uint64_t bytes, uint64_t of);

// How a model is planned and opened.
typedef struct {
    // sizeof(waste_options).
    size_t size;
    // The RAM the model may take; 0 for its floor and up to three working sets of expert cache.
    uint64_t budget_bytes;
    // Context length, prompt and answer together; 0 for 4096.
    uint64_t ctx;
    // Compute threads; 0 for one a CPU.
    uint64_t threads;
    // CPUs to bind them to (Linux), `cpu_count` of them, or NULL.
    const uint64_t *cpus;
    // How many they are; then also the number of threads, unless that is given.
    size_t cpu_count;
    // Tokens of a prompt that go through the model together; 0 for 256.
    uint64_t prefill_chunk;
    // What earlier runs have learned of the model's experts (see waste_save_usage): a file to warm the cache with, or
    // NULL. One that is not there is no error.
    const char *usage_path;
    // A waste_kv.
    uint32_t kv;
    // A waste_arith.
    uint32_t arith;
    // Not 0: read experts through the page cache.
    uint32_t buffered_reads;
    // Not 0: check the checksum of every record that is read.
    uint32_t verify;
    // Not 0: open even where the floor is above the usable RAM.
    uint32_t allow_swap;
    // Not 0: load the model's vision tower and count it, so that sessions take images.
    uint32_t vision;
    // Patches that an image is shrunk to, at least 4; a quarter of them are positions. 0 for what the model says, at
    // most 1024.
    uint64_t max_patches;
    // Told by waste_open how far it is, or NULL.
    waste_on_load on_load;
    // What it is called with.
    void *user;
} waste_options;

// What a model needs, in bytes, and what it gets.
typedef struct {
    // sizeof(waste_plan_info).
    size_t size;
    // Trunk tensors that stay in memory.
    uint64_t trunk_bytes;
    // The state of a session.
    uint64_t state_bytes;
    // Working buffers of a session.
    uint64_t scratch_bytes;
    // Two layers' chosen experts.
    uint64_t min_expert_cache_bytes;
    // The sum, with vision: the least the model runs with, with one session.
    uint64_t floor_bytes;
    // What a token reads when nothing is cached.
    uint64_t working_set_bytes;
    // All experts.
    uint64_t experts_bytes;
    // RAM this process may count on.
    uint64_t usable_ram_bytes;
    // What a budget should not exceed.
    uint64_t cap_bytes;
    // What a run may take.
    uint64_t budget_bytes;
    // What it will really take: a budget may be more than all experts need.
    uint64_t taken_bytes;
    // The part of the budget that caches experts.
    uint64_t expert_cache_bytes;
    // Not 0: the budget stays within the cap.
    uint64_t fits;
    // The vision tower, and what images take; 0 without vision.
    uint64_t vision_bytes;
} waste_plan_info;

// What a model is.
typedef struct {
    // sizeof(waste_model_info).
    size_t size;
    // "kimi-k3" or "kimi-linear". It belongs to the library, for ever.
    const char *arch;
    // Layers.
    uint64_t layers;
    // Experts of a layer.
    uint64_t experts;
    // Experts of a token in a layer.
    uint64_t top_k;
    // Width of the stream.
    uint64_t hidden;
    // Logits of a token.
    uint64_t vocab;
    // Parameters.
    uint64_t params_total;
    // Parameters that a token uses.
    uint64_t params_active;
    // Context length it was opened with.
    uint64_t ctx;
    // The token that begins a text, or -1.
    int64_t begin_token;
    // The token that ends a text, or -1; there may be more of them.
    int64_t end_token;
    // The token that holds the place of a row of an image, or -1.
    int64_t media_token;
} waste_model_info;

// What the expert cache has done since the model was opened.
typedef struct {
    // sizeof(waste_stats).
    size_t size;
    // Demands met by the cache.
    uint64_t expert_hits;
    // Demands met by what was read ahead.
    uint64_t expert_ahead_hits;
    // Demands that had to be read.
    uint64_t expert_misses;
    // Records read ahead.
    uint64_t expert_ahead_reads;
    // Records read to warm the cache.
    uint64_t expert_warm_reads;
    // Bytes read.
    uint64_t bytes_read;
    // Nanoseconds spent waiting for reads.
    uint64_t stall_nanos;
    // Not 0: reads go past the page cache.
    uint64_t direct_io;
} waste_stats;

// A text: `length` bytes of UTF-8 at `bytes`. NULL is no text.
typedef struct {
    // Where it begins.
    const char *bytes;
    // Its length in bytes.
    size_t length;
} waste_text;

// How an answer is written. All zeros: at most 256 tokens, each the most probable one, until the model ends its text.
typedef struct {
    // sizeof(waste_params).
    size_t size;
    // Most tokens; 0 for 256.
    uint64_t max_tokens;
    // 0 to 2; 0 takes the most probable token.
    double temperature;
    // Keep the shortest prefix of candidates with this probability; 0 and 1 keep all.
    double top_p;
    // Drop candidates below this part of the highest probability; 0 keeps all.
    double min_p;
    // Taken from the logit of a token that was generated before, -2 to 2.
    double presence_penalty;
    // Taken from it once for each time it was, -2 to 2.
    double frequency_penalty;
    // The seed, if `seeded`.
    uint64_t seed;
    // Texts that end the answer, `stop_count` of them; they are no part of it.
    const waste_text *stops;
    // How many they are.
    size_t stop_count;
    // Ids that end the answer beside the model's own, `stop_id_count` of them.
    const uint32_t *stop_ids;
    // How many they are.
    size_t stop_id_count;
    // A JSON schema that the answer keeps to, or no text.
    waste_text json_schema;
    // A grammar (Lark) that it keeps to, or no text.
    waste_text grammar;
    // Keep this many candidates; 0 keeps all.
    uint32_t top_k;
    // Not 0: random numbers begin with `seed`. 0: they go on with the session's, which begin with a seed of the
    // system's.
    uint32_t seeded;
    // Not 0: the model's own ends of a text are tokens like others.
    uint32_t ignore_end;
    // Not 0: control tokens may be chosen too.
    uint32_t any_token;
} waste_params;

// Takes text as it becomes certain: `length` bytes of UTF-8, not ended by a zero, which belong to the library and last
// for the call. What it returns ends the answer if it is not 0. It may use the model, but not this session.
typedef int32_t (*waste_on_text)(void *user, const char *text, size_t length);

// What came of a generation.
typedef struct {
    // sizeof(waste_outcome).
    size_t size;
    // Tokens of the answer, without one that ended it.
    uint64_t tokens;
    // Tokens that went through the model before the first one.
    uint64_t prompt_tokens;
    // The seed in use.
    uint64_t seed;
    // Seconds until the first token was known.
    double prefill_seconds;
    // Seconds from then on.
    double decode_seconds;
    // A waste_finish.
    uint64_t finish;
} waste_outcome;

// What an image takes.
typedef struct {
    // sizeof(waste_image_info).
    size_t size;
    // Pixels of a row, turned upright.
    uint64_t width;
    // Rows.
    uint64_t height;
    // Positions of the context.
    uint64_t positions;
} waste_image_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// What the last failed call of this thread says: what was being done, expected and found, and what to do next. Empty
// if none failed. It belongs to the library, until the next call of this thread that fails.
const char *waste_last_error(void);

// The stable name of the last failure of this thread, such as `budget_below_floor`: the `code` of the tools' JSON.
// Whose it is: as waste_last_error.
const char *waste_last_error_code(void);

// A status in words; of any number. It belongs to the library, for ever.
const char *waste_status_text(int32_t status);

// The version of the library, such as "0.1.0". It belongs to the library, for ever.
const char *waste_version(void);

// The same as a number: 10000 · major + 100 · minor + patch.
uint32_t waste_version_number(void);

// What was built, in a line: version, the kernel set this CPU gets, and those this build has. It
// belongs to the library, for ever.
const char *waste_build_info(void);

// Looks at the machine.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_machine(waste_machine_info *machine);

// Says what the model in a directory needs on this machine. No weights are read, nothing is reserved. A budget below
// the floor, and a floor above the usable RAM, are WASTE_STATUS_SPACE.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_plan(const char *dir,
                        const waste_options *options,
                        waste_plan_info *plan);

// Opens the model in a directory, a container or a checkpoint, within its plan, and reserves what it takes, so that
// other engines on this machine know. On success `*model` is to be ended with waste_close. With `vision`, a model that
// has no tower is refused.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_open(const char *dir,
                        const waste_options *options,
                        waste_model **model);

// Ends a model; NULL does nothing. Its memory goes when its last session has ended too.
//
// # Safety
// See the manners at the top of the header.
void waste_close(waste_model *model);

// Stops the waste_generate, waste_eval or waste_session_attach of this model that runs, at its next token, chunk or
// layer, or else the next one. May be called from any thread and from a signal handler.
//
// # Safety
// See the manners at the top of the header.
void waste_cancel(const waste_model *model);

// Says what a model is.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_info(const waste_model *model, waste_model_info *info);

// Says what a model's expert cache has done.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_model_stats(const waste_model *model, waste_stats *stats);

// Adds how often the model's experts were used since it was opened to a file, for the `usage_path` of later runs. The
// file is written whole or not at all. Once before the end: a second call counts the first one's uses again.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_save_usage(const waste_model *model,
                              const char *path);

// Encodes a text; all of it is plain text, and nothing in it becomes a control token. Up to `capacity` ids go to
// `ids`, and `*count` says how many there are.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_tokenize(const waste_model *model,
                            const char *text,
                            size_t length,
                            uint32_t *ids,
                            size_t capacity,
                            size_t *count);

// The same of markup: names of control tokens in it become those. Never for what a user wrote.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_tokenize_markup(const waste_model *model,
                                   const char *text,
                                   size_t length,
                                   uint32_t *ids,
                                   size_t capacity,
                                   size_t *count);

// Decodes ids: up to `capacity` bytes go to `text`, without a zero at the end, and `*length` says how many there are.
// Tokens may end within a character, so the bytes need not be UTF-8.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_detokenize(const waste_model *model,
                              const uint32_t *ids,
                              size_t count,
                              char *text,
                              size_t capacity,
                              size_t *length);

// Makes an empty session, with all the memory it will need. On success `*session` is to be ended with
// waste_session_close. The model's plan has room for one; each further one takes state and scratch once more.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_open(const waste_model *model, waste_session **session);

// Ends a session; NULL does nothing.
//
// # Safety
// See the manners at the top of the header.
void waste_session_close(waste_session *session);

// Back to the empty session.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_reset(waste_session *session);

// Tells a session's tokens, answers included: up to `capacity` ids go to `ids`, and `*count` says how many there are.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_tokens(const waste_session *session,
                                  uint32_t *ids,
                                  size_t capacity,
                                  size_t *count);

// Writes the session to a file, durably, and whole or not at all. `waste-run --session` goes on from it too.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_save(const waste_session *session, const char *path);

// Takes a session from a file, which must be of the same model and options. What is damaged, foreign or not there is
// refused, and the session stays as it was; only if the file cannot be read to its end a reset is needed.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_load(waste_session *session,
                                const char *path);

// Takes tokens in and gives the logits of the last one: up to `capacity` of them go to `logits`, the model's vocabulary
// is how many there are, and fewer are refused before anything is done. The session holds the tokens then.
// After an error in the middle the session needs a reset; after WASTE_STATUS_INTERRUPTED the same call without new
// tokens goes on.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_eval(waste_session *session,
                        const uint32_t *ids,
                        size_t count,
                        float *logits,
                        size_t capacity);

// Takes tokens in and writes an answer, from wherever the session is. Text is handed to `on_text` (or NULL) with `user`
// as it becomes certain; `outcome` (or NULL) says what came of it, and waste_session_tokens what was written.
// Without new tokens it goes on from what was written before. After an error in the middle the session needs a
// reset.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_generate(waste_session *session,
                            const uint32_t *ids,
                            size_t count,
                            const waste_params *params,
                            waste_on_text on_text,
                            void *user,
                            waste_outcome *outcome);

// Says what an image file takes (PNG, JPEG, GIF, BMP, TGA, WebP, PSD: `length` bytes at `file`); only its header is
// looked at. The model must have been opened with `vision`.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_image_measure(const waste_model *model,
                                 const uint8_t *file,
                                 size_t length,
                                 waste_image_info *image);

// Writes the tokens that stand for an image in a prompt, its placeholders among them: up to `capacity` ids go to `ids`,
// and `*count` says how many there are. `image` comes from waste_image_measure or waste_session_attach.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_image_tokens(const waste_model *model,
                                const waste_image_info *image,
                                uint32_t *ids,
                                size_t capacity,
                                size_t *count);

// Encodes an image file and attaches it to a session: the placeholders of the next waste_generate or waste_eval take
// its positions, and must be as many as all images attached take, each image's side by side, in their order. `image`
// (or NULL) says what it takes. waste_cancel stops it, and it may be called again then. Images that wait for their
// tokens are no part of a saved session; a reset drops them.
//
// # Safety
// See the manners at the top of the header.
waste_status waste_session_attach(waste_session *session,
                                  const uint8_t *file,
                                  size_t length,
                                  waste_image_info *image);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WASTE_H */
