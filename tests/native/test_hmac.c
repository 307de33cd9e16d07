/* Tests of SHA-256 and HMAC, against values of other implementations. */
#include "support.h"

#include "soft/base/hmac.h"

static void to_hex(const uint8_t digest[SOFT_DIGEST], char out[2 * SOFT_DIGEST + 1])
{
    int i;

    for (i = 0; i < SOFT_DIGEST; i++)
        sprintf(out + 2 * i, "%02x", digest[i]);
}

static void expect_digest(const uint8_t digest[SOFT_DIGEST], const char *expected, struct check_place place)
{
    char text[2 * SOFT_DIGEST + 1];

    to_hex(digest, text);
    check_true(!strcmp(text, expected), place, expected);
}

/* Lengths around those at which the padding needs another block; bytes are 7 * n. */
static const struct {
    unsigned int length;
    const char *digest;
} hashed[] = {
    {0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {1, "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"},
    {55, "576a1bf8d4478657e6dc4af9398544765c2a92cde28478b019235cfed315fc09"},
    {56, "9b20501dfd1d99161c257950f3444f3e49230c351c5c8e0943ef369f85f5205d"},
    {63, "30b345906b493f06f69444b6521113511c242f30e29840462950035043682f1e"},
    {64, "d8bc63b4fc1156e5e7d95a418b9bf54cd3174bedbc2db40f74895349b229b3c0"},
    {65, "1ee23b0fbcaecc1aff4a9e8f1645f35ab2c8e13609cd73b68df8b5e3f63ce073"},
    {119, "7a6589821178918ca8d9edaba5abfc1e9b2669564f4469b66885379c1530b2c8"},
    {120, "655250427d56b1b0eeb8497d21428704273458a01772d6881b65c0abac0f8a98"},
    {1000, "89f4ff56a25dd1db06a4ce6033603775d705fb96f30f8693733fef602a1ca532"},
};

static void hashes_match_the_standard(void)
{
    uint8_t data[1000], digest[SOFT_DIGEST];
    struct soft_sha256 sha;
    unsigned int i, step, at;

    for (i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 7);
    for (i = 0; i < COUNT_OF(hashed); i++) {
        for (step = 1; step <= 1000; step += 37) { /* however it is given */
            soft_sha256_begin(&sha);
            for (at = 0; at < hashed[i].length; at += step)
                soft_sha256_add(&sha, data + at, hashed[i].length - at < step ? hashed[i].length - at : step);
            soft_sha256_end(&sha, digest);
            expect_digest(digest, hashed[i].digest, HERE);
        }
    }
}

static void expect_hmac(const void *key, size_t key_size, const char *text, const char *expected,
                        struct check_place place)
{
    uint8_t digest[SOFT_DIGEST];
    struct soft_hmac hmac;

    soft_hmac_begin(&hmac, key, key_size);
    soft_hmac_add(&hmac, text, strlen(text) / 2);
    soft_hmac_add(&hmac, text + strlen(text) / 2, strlen(text) - strlen(text) / 2);
    soft_hmac_end(&hmac, digest);
    expect_digest(digest, expected, place);
}

/* RFC 4231: test cases 1, 2 and 6. */
static void macs_match_the_standard(void)
{
    uint8_t key[131];

    memset(key, 0x0b, 20);
    expect_hmac(key, 20, "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", HERE);
    expect_hmac("Jefe", 4, "what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", HERE);
    memset(key, 0xaa, sizeof(key));
    expect_hmac(key, sizeof(key), "Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", HERE);
}

static void digests_differ_in_any_bit(void)
{
    uint8_t a[SOFT_DIGEST] = {0}, b[SOFT_DIGEST] = {0};
    int i;

    CHECK(soft_digest_equal(a, b));
    for (i = 0; i < SOFT_DIGEST * 8; i++) {
        b[i / 8] ^= (uint8_t)(1 << i % 8);
        CHECK(!soft_digest_equal(a, b));
        b[i / 8] = 0;
    }
}

CHECK_MAIN_ONCE(CASE(hashes_match_the_standard), CASE(macs_match_the_standard), CASE(digests_differ_in_any_bit))
