#include "support.h"
#include "support_threads.h"

struct starter {
    pthread_t thread;
    pthread_barrier_t *barrier;
    void (*function)(void *);
    void *argument;
};

static void *start_together(void *argument)
{
    struct starter *starter = argument;

    pthread_barrier_wait(starter->barrier);
    starter->function(starter->argument);
    return NULL;
}

void run_threads(size_t count, void (*function)(void *), void *arguments, size_t size)
{
    struct starter *starters = calloc(count, sizeof(*starters));
    pthread_barrier_t barrier;
    size_t i;

    REQUIRE(starters != NULL);
    REQUIRE_EQ(pthread_barrier_init(&barrier, NULL, (unsigned int)count), 0);
    for (i = 0; i < count; i++) {
        starters[i].barrier = &barrier;
        starters[i].function = function;
        starters[i].argument = (char *)arguments + i * size;
        REQUIRE_EQ(pthread_create(&starters[i].thread, NULL, start_together, &starters[i]), 0);
    }
    for (i = 0; i < count; i++)
        CHECK_EQ(pthread_join(starters[i].thread, NULL), 0);
    pthread_barrier_destroy(&barrier);
    free(starters);
}

unsigned int next_random(unsigned int *state, unsigned int limit)
{
    *state = *state * 1103515245u + 12345u;
    return (*state >> 8) % limit;
}
