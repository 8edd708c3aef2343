import{b as a}from"./chunk-O4CCFG7K.js";import"./chunk-ULELGBTR.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
