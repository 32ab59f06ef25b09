/* An answer that goes on from a file; logits; what errors say. Ends with 0 if all is as it should be.
 *
 *     session MODEL FILE
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "waste.h"

#define CHECK(what)                                                                                          \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%d: %s: %s\n", __LINE__, #what, waste_last_error());                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define OK(call) CHECK((call) == WASTE_STATUS_OK)

struct text {
    size_t length;
    char bytes[4096];
    int stop_after;
};

static int32_t collect(void *user, const char *bytes, size_t length)
{
    struct text *text = user;
    if (length > sizeof text->bytes - text->length)
        return 1;
    memcpy(text->bytes + text->length, bytes, length);
    text->length += length;
    return text->stop_after > 0 && --text->stop_after == 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: session MODEL FILE\n");
        return 2;
    }
    waste_options options = {sizeof options};
    options.ctx = 256;
    waste_model *model = NULL;
    OK(waste_open(argv[1], &options, &model));
    waste_model_info info = {sizeof info};
    OK(waste_info(model, &info));

    uint32_t ids[64];
    size_t count;
    const char *prompt = "Once upon a time";
    OK(waste_tokenize(model, prompt, strlen(prompt), ids, 64, &count));
    char back[64];
    size_t length;
    OK(waste_detokenize(model, ids, count, back, sizeof back, &length));
    CHECK(length == strlen(prompt) && memcmp(back, prompt, length) == 0);

    /* The whole text at once. */
    waste_params params = {sizeof params};
    params.max_tokens = 30;
    params.temperature = 0.9;
    params.seeded = 1;
    params.seed = 11;
    waste_session *whole, *part;
    static struct text one, two;
    waste_outcome outcome = {sizeof outcome};
    OK(waste_session_open(model, &whole));
    OK(waste_generate(whole, ids, count, &params, collect, &one, &outcome));
    CHECK(outcome.tokens > 10 && outcome.seed == 11);

    /* The same in two parts: stopped by the callback, saved, loaded into another session, and on from there. */
    OK(waste_session_open(model, &part));
    two.stop_after = 5;
    OK(waste_generate(part, ids, count, &params, collect, &two, &outcome));
    CHECK(outcome.finish == WASTE_FINISH_CANCELLED && outcome.tokens < 30);
    OK(waste_session_save(part, argv[2]));
    waste_session_close(part);
    OK(waste_session_open(model, &part));
    OK(waste_session_load(part, argv[2]));
    params.max_tokens = 30 - outcome.tokens;
    params.seeded = 0;
    OK(waste_generate(part, NULL, 0, &params, collect, &two, &outcome));
    CHECK(one.length == two.length && memcmp(one.bytes, two.bytes, one.length) == 0);
    uint32_t all[128], again[128];
    size_t n, m;
    OK(waste_session_tokens(whole, all, 128, &n));
    OK(waste_session_tokens(part, again, 128, &m));
    CHECK(n == m && n > count && memcmp(all, again, n * sizeof *all) == 0);

    /* Logits; and what is refused says why, and changes nothing. */
    float *logits = malloc(info.vocab * sizeof *logits);
    CHECK(logits != NULL);
    OK(waste_session_reset(whole));
    CHECK(waste_eval(whole, ids, count, logits, info.vocab - 1) == WASTE_STATUS_USAGE);
    OK(waste_eval(whole, ids, count, logits, info.vocab));
    for (size_t i = 0; i < info.vocab; i++)
        CHECK(isfinite(logits[i]));
    uint32_t none = (uint32_t)info.vocab;
    CHECK(waste_eval(whole, &none, 1, logits, info.vocab) == WASTE_STATUS_DATA);
    CHECK(strcmp(waste_last_error_code(), "token_out_of_range") == 0);
    OK(waste_session_tokens(whole, all, 128, &n));
    CHECK(n == count);
    free(logits);

    /* In any order: sessions keep what they need of their model. */
    waste_close(model);
    OK(waste_session_reset(part));
    OK(waste_generate(part, ids, count, NULL, NULL, NULL, NULL));
    waste_session_close(part);
    waste_session_close(whole);

    waste_model *nothing;
    CHECK(waste_open("there/is/no/model", NULL, &nothing) == WASTE_STATUS_DATA && nothing == NULL);
    CHECK(strlen(waste_last_error()) > 10);
    return 0;
}
