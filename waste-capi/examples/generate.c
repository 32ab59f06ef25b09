/* Plans and opens a model, writes a text, and says what the expert cache did.
 *
 *     cc -I waste-capi/include waste-capi/examples/generate.c -L target/release -lwaste_capi -o generate
 *     LD_LIBRARY_PATH=target/release ./generate tests/models/k3-tales "Once upon a time"
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "waste.h"

static void check(waste_status status, const char *doing)
{
    if (status != WASTE_STATUS_OK) {
        fprintf(stderr, "%s: %s (%s)\n", doing, waste_last_error(), waste_last_error_code());
        exit(status);
    }
}

/* Text comes as it is certain; another return value than 0 would end the answer. */
static int32_t show(void *user, const char *text, size_t length)
{
    size_t *shown = user;
    *shown += length;
    fwrite(text, 1, length, stdout);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: generate MODEL [PROMPT]\n");
        return 2;
    }
    const char *prompt = argc > 2 ? argv[2] : "Once upon a time";
    fprintf(stderr, "%s\n", waste_build_info());

    waste_options options = {sizeof options};
    options.ctx = 512;
    waste_plan_info plan = {sizeof plan};
    check(waste_plan(argv[1], &options, &plan), "planning");
    fprintf(stderr, "floor %.1f MiB, budget %.1f MiB\n", plan.floor_bytes / 1048576.0, plan.budget_bytes / 1048576.0);

    waste_model *model;
    check(waste_open(argv[1], &options, &model), "opening");
    waste_model_info info = {sizeof info};
    check(waste_info(model, &info), "looking at the model");

    /* The model's first token, then the prompt: as many ids as there are bytes will do. */
    size_t capacity = strlen(prompt) + 1, count = 0, ids_count = 0;
    uint32_t *ids = malloc(capacity * sizeof *ids);
    if (ids == NULL)
        return 4;
    if (info.begin_token >= 0)
        ids[ids_count++] = (uint32_t)info.begin_token;
    check(waste_tokenize(model, prompt, strlen(prompt), ids + ids_count, capacity - ids_count, &count), "tokenizing");
    ids_count += count;

    waste_session *session;
    check(waste_session_open(model, &session), "making a session");
    waste_params params = {sizeof params};
    params.max_tokens = 40;
    params.temperature = 0.8;
    params.seeded = 1;
    params.seed = 7;
    waste_outcome outcome = {sizeof outcome};
    size_t shown = 0;
    printf("%s", prompt);
    check(waste_generate(session, ids, ids_count, &params, show, &shown, &outcome), "writing");
    printf("\n");
    fprintf(stderr, "%d tokens, %zu bytes, finish %d\n", (int)outcome.tokens, shown, (int)outcome.finish);

    waste_stats stats = {sizeof stats};
    check(waste_model_stats(model, &stats), "counting");
    fprintf(stderr, "experts: %llu hits, %llu misses, %llu bytes\n", (unsigned long long)stats.expert_hits,
            (unsigned long long)stats.expert_misses, (unsigned long long)stats.bytes_read);

    waste_session_close(session);
    waste_close(model);
    free(ids);
    return 0;
}
